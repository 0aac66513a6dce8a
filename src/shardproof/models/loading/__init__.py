"""Loading models and their processors with transformers' classes, from the files of a folder."""
