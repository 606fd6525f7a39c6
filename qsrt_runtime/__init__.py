"""Read and run QSRT packages: mixture-of-experts weights at about 3 bits."""

__version__ = "0.1.0"
