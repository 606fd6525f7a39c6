"""The one error of the format."""


class FormatError(ValueError):
    """A file or package does not say what the format allows.

    The message names the file and the field or tensor, what was found and what was expected.
    """
