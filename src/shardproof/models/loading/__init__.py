"""Models and their processors, as they are loaded: by classes of transformers, from the files of a folder."""
