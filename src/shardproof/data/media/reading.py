"""Reads files into inputs for a processor: images with PIL, audio with soundfile, videos as frames."""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from shardproof.data.forms.parts import KINDS, Problem, decoded_uri, parts_of, shown
from shardproof.data.media.broken_off import check_whole
from shardproof.data.media.limits import Limits
from shardproof.data.media.scaling import full_size as full_size
from shardproof.data.media.scaling import scaled
from shardproof.data.rows import Row

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

MOST_PIXELS = 100_000_000  # of an image in its file: more is not a photograph, but an attack on memory
LEAST_SECONDS = 0.1  # of audio: towers turn less into no token, or into one that some models cannot place


# Formats that Pillow recognises as images and nothing else; a file it takes for another may be a video (MPEG).
PICTURES = {"AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "TIFF", "WEBP"}

# Pillow's exceptions for broken files and wrong formats.
BROKEN = (OSError, ValueError, SyntaxError, LookupError, TypeError, EOFError, struct.error)


class Frames(list[Any]):
    """Frames of a video, with their times.

    Attributes:
        numbers: the indices of these frames in the video.
        rate: the video's frames per second; None if unknown.
    """

    def __init__(self, pictures: Iterable[Any], numbers: Sequence[int], rate: float | None = None) -> None:
        super().__init__(pictures)
        self.numbers, self.rate = list(numbers), rate

    def of_at_least(self, count: int) -> Frames:
        """At least `count` frames, repeating the last one if there are fewer."""
        more = max(0, count - len(self))
        return Frames([*self, *self[-1:] * more], [*self.numbers, *self.numbers[-1:] * more], self.rate)

    @property
    def metadata(self) -> dict[str, Any]:
        """The fields of transformers' `VideoMetadata`."""
        total = self.numbers[-1] + 1
        width, height = self[0].size
        return {
            "total_num_frames": total,
            "fps": self.rate,
            "duration": total / self.rate if self.rate else None,
            "frames_indices": list(self.numbers),
            "width": width,
            "height": height,
        }


def files_of(row: Row, limits: Limits) -> dict[str, list[Any]]:
    """The files of a row, decoded, for each of KINDS in the order of the conversation: images as PIL images in RGB,
    audio as float32 arrays of shape (samples,), videos as lists of images.

    Raises:
        Problem: a file is missing, unreadable, too large or too long, is outside the root, or is not on this machine
            and must not be fetched; the message names it.
    """
    readers = {"image": read_image, "audio": read_audio, "video": read_video}
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for part in parts_of(row.messages):
        kind = part["type"]
        file = part[kind]
        try:
            found[kind].append(readers[kind](file, row, limits))
        except Problem as problem:
            number = len(found[kind]) + 1
            raise Problem(f"{kind} {number} ({shown(file)}): {problem}") from None
    return found


def read_image(file: Any, row: Row, limits: Limits) -> Image:
    """An image in RGB, upright, of at most `max_pixels`."""
    from PIL import Image

    try:
        with _picture(_opened(file, row, limits)) as picture:
            return _still(picture, limits)
    except (*BROKEN, Image.DecompressionBombError) as error:
        raise Problem(f"not a readable image: {_reason(error)}") from None


@contextmanager
def _picture(source: Any) -> Iterator[Any]:
    """An image or animation opened with Pillow, after a check of its size."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # its limit differs from ours
        with Image.open(source) as picture:
            _check_size(*picture.size)
            yield picture


def _still(picture: Any, limits: Limits) -> Image:
    from PIL import ImageOps

    ImageOps.exif_transpose(picture, in_place=True)  # without in_place, it would copy even an upright image
    return scaled(_in_rgb(picture), limits)


def _in_rgb(picture: Image) -> Image:
    """The image in RGB, on white where it is transparent. Pillow would show whatever colour is hidden there, and clip
    values of more than 8 bits at 255."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        import numpy as np

        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        raise Problem("its pixels have 32 bits, whose range is unknown: save it with 8 or 16 bits")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def read_audio(file: Any, row: Row, limits: Limits) -> np.ndarray[Any, Any]:
    """Mono audio: float32 of shape (samples,), at `sampling_rate`."""
    soundfile = _soundfile()
    source = _opened(file, row, limits)
    try:
        with soundfile.SoundFile(source) as sound:
            _check_seconds(sound.frames / sound.samplerate, limits)
            check_whole(sound)
            samples, rate = sound.read(dtype="float32", always_2d=True), sound.samplerate
    except (OSError, RuntimeError, ValueError) as error:
        raise Problem(f"not readable audio: {_reason(error)}") from None
    if not len(samples):
        raise Problem("the audio is empty")
    if len(samples) < LEAST_SECONDS * rate:
        raise Problem(f"it lasts {len(samples) / rate:.3f} s, audio needs at least {LEAST_SECONDS:g}")
    if not math.isfinite(samples.sum()):
        raise Problem("the audio holds values that are not finite (NaN or infinite)")
    return resampled(samples.mean(axis=1), rate, limits.sampling_rate)


def read_video(file: Any, row: Row, limits: Limits) -> Frames:
    """Frames of one size, evenly spaced over the video, `fps` per second and `max_frames` at most."""
    limits = limits.of_frames()
    if isinstance(file, list):  # images without times
        numbers = spread(len(file), limits.max_frames)
        frames = Frames([read_image(file[i], row, limits) for i in numbers], numbers)
        if len({frame.size for frame in frames}) > 1:
            raise Problem("the frames of the video differ in size")
        return frames
    source = _opened(file, row, limits)
    from PIL import Image

    is_picture = False
    try:
        with _picture(source) as moving:  # GIF, WebP and APNG
            is_picture = moving.format in PICTURES
            if getattr(moving, "n_frames", 1) == 1 or moving.format == "MPO":  # a JPEG followed by a thumbnail
                return Frames([_still(moving, limits)], [0])
            return _animation(moving, limits)
    except (*BROKEN, Image.DecompressionBombError) as error:
        if is_picture or isinstance(error, Image.DecompressionBombError):
            raise Problem(f"not a readable video: {_reason(error)}") from None
    source.seek(0)
    return _film(source, limits)


def _animation(moving: Any, limits: Limits) -> Frames:
    total = getattr(moving, "n_frames", 1)
    wanted = spread(total, limits.max_frames)
    pictures, lasts = _shown(moving, wanted, limits)
    fewer = spread(total, limits.frames_in(lasts or None))
    if len(fewer) < len(wanted):
        wanted, (pictures, _) = fewer, _shown(moving, fewer, limits)
    return Frames(pictures, wanted, total / lasts if lasts else None)


def _shown(moving: Any, wanted: Sequence[int], limits: Limits) -> tuple[list[Image], float]:
    """Some frames of an animation, and the duration of all of them in seconds."""
    pictures, lasts = [], 0.0
    for i in range(getattr(moving, "n_frames", 1)):
        moving.seek(i)
        moving.load()  # some formats give a frame's duration only now
        lasts += moving.info.get("duration", 0) / 1000
        _check_seconds(lasts, limits)
        if i in wanted:
            pictures.append(scaled(_in_rgb(moving), limits))
    return pictures, lasts


def _film(source: Any, limits: Limits) -> Frames:
    """MP4 and the like, with PyAV."""
    try:
        import av
    except ImportError:
        raise Problem(
            "not an animated GIF, WebP or PNG; other videos need PyAV: pip install 'shardproof[video]'"
        ) from None
    try:
        with av.open(source) as film:
            if not film.streams.video:
                raise Problem("the video has no frames")
            _check_size(film.streams.video[0].width, film.streams.video[0].height)
            _check_seconds(float(film.duration or 0) / av.time_base, limits)
            total, began, lasts = 0, None, 0.0  # seconds
            for frame in film.decode(video=0):  # not every file states its length
                if frame.time is not None:
                    began = frame.time if began is None else began  # recordings of broadcasts do not start at 0
                    lasts = frame.time - began
                    _check_seconds(lasts, limits)
                total += 1
            if not total:
                raise Problem("the video has no frames")
            rate = film.streams.video[0].average_rate
            wanted = spread(total, limits.frames_in(lasts + 1 / rate if rate else None))
            film.seek(0)
            taken = (frame for i, frame in enumerate(film.decode(video=0)) if i in wanted)
            # The reformatter of a frame has threads that live until the frame is garbage-collected; in a process forked
            # before that, they do not exist, and collecting the frame waits for them.
            colours = av.video.reformatter.VideoReformatter()
            shown = ((colours.reformat(frame, format="rgb24").to_image(), frame) for frame in taken)
            pictures = [_upright(scaled(picture, limits), frame) for picture, frame in shown]
            return Frames(pictures, wanted, float(rate) if rate else None)
    except (av.FFmpegError, ValueError) as error:
        raise Problem(f"not a readable video: {_reason(error)}") from None


def _upright(picture: Image, frame: Any) -> Image:
    """A frame in its display orientation. Phones store it as the camera was held, with a matrix for the rotation."""
    from PIL.Image import Transpose

    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return picture
    xx, xy, _, yx, yy, *_ = struct.unpack("=9i", bytes(matrix))  # to the right: xx * x + yx * y; down: xy * x + yy * y
    right, down = xx, yy
    if abs(xy) > abs(xx):
        picture, right, down = picture.transpose(Transpose.TRANSPOSE), yx, xy
    if right < 0:
        picture = picture.transpose(Transpose.FLIP_LEFT_RIGHT)
    return picture.transpose(Transpose.FLIP_TOP_BOTTOM) if down < 0 else picture


def spread(there: int, most: int) -> list[int]:
    """At most `most` of the numbers below `there`, evenly spaced, including the first and the last."""
    if there <= most:
        return list(range(there))
    return [round(i * (there - 1) / max(most - 1, 1)) for i in range(most)]


def resampled(samples: np.ndarray[Any, Any], rate: int, wanted: int) -> np.ndarray[Any, Any]:
    """The audio at another rate, by truncating its spectrum or padding it with zeros.

    Args:
        samples: of shape (samples,).
        rate: the rate of `samples` in Hz; `wanted`: that of the result.

    Returns: float32 of shape (round(samples * wanted / rate),).
    """
    import numpy as np

    if rate == wanted:
        return np.ascontiguousarray(samples, dtype=np.float32)
    length = max(1, round(len(samples) * wanted / rate))
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(samples))).astype(np.float32)


# --- where a file lies --------------------------------------------------------------------------------


def _opened(file: Any, row: Row, limits: Limits) -> Any:
    """A readable object with the contents of a file."""
    if isinstance(file, bytes):
        return io.BytesIO(file)
    if file.startswith("data:"):
        return io.BytesIO(decoded_uri(file))
    if limits.remote and _is_address(file):
        from shardproof.data.sources.remote import fetched, fetched_once

        within = limits.remote_bytes, limits.remote_seconds
        folder = limits.remote_cache
        return io.BytesIO(fetched(file, *within) if folder is None else fetched_once(file, folder, *within))
    path = located(file, row, limits)
    try:
        return io.BytesIO(path.read_bytes())
    except OSError as error:
        raise Problem(f"it cannot be read: {error.strerror or error}") from None


def located(file: str, row: Row, limits: Limits) -> Path:
    """The path of the file, with links resolved. Raises Problem for a network address, and for a path outside the
    root."""
    if _is_address(file):
        raise Problem(
            "a network address, which is not fetched: download the file and give its path, or allow it with "
            "--allow-remote-media"
        )
    root = (limits.root or Path(row.source).expanduser().parent) if row.source else Path("/")
    try:
        path = (root / Path(file.removeprefix("file://")).expanduser()).resolve()
        there = _is_there(path)
        if not there and file.startswith("file://"):  # a proper URL has spaces and the like as %20
            path = (root / unquote(file.removeprefix("file://").removeprefix("localhost"))).resolve()
            there = _is_there(path)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, too long a name, an unknown user
        raise Problem(f"not a file path: {_reason(error)}") from None
    if not path.is_relative_to(root.resolve()):
        raise Problem(f"it is outside {root.resolve()}; --media-root names the folder that files may be in")
    if not path.is_file():
        raise Problem("there is no such file" if not there else "it is not a file")
    return path


def _is_there(path: Path) -> bool:
    """Like `path.exists()`, which since Python 3.14 hides other errors of a path."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def identity(file: Any, row: Row, limits: Limits) -> Any:
    """What identifies a file of a row: its path, or the value that contains it."""
    if isinstance(file, list):  # the images of a video
        return [identity(one, row, limits) for one in file]
    return str(located(file, row, limits)) if _is_path(file) else file


def state_of(file: Any, row: Row, limits: Limits) -> Any:
    """A file's path, size and modification time; None if it has no path, because its row contains it or names an
    address. Raises Problem if it is missing, or must not be fetched."""
    if isinstance(file, list):  # the images of a video
        return [state_of(one, row, limits) for one in file]
    if not _is_path(file) and not (isinstance(file, str) and _is_address(file) and not limits.remote):
        return None
    path = located(file, row, limits)
    found = path.stat()
    return [str(path), found.st_size, found.st_mtime_ns]


def _is_path(file: Any) -> bool:
    return isinstance(file, str) and not file.startswith("data:") and not _is_address(file)


def _is_address(file: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", file) is not None and not file.startswith("file://")


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise Problem(f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}")


def _check_seconds(seconds: float, limits: Limits) -> None:
    if seconds > limits.max_seconds:
        raise Problem(f"it lasts {seconds:.1f} s, --max-seconds is {limits.max_seconds:g}")


def _soundfile() -> Any:
    try:
        import soundfile
    except (ImportError, OSError):  # the wheel contains libsndfile; a source build may lack it
        raise Problem("audio needs the package soundfile: pip install 'shardproof[media]'") from None
    return soundfile


def _reason(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "it", text.splitlines()[0])[:200]
