"""Packaging of paddle-vl. Paddle itself is an extra: its CPU and GPU wheels exclude each other."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
INIT = (ROOT / "paddle_vl" / "__init__.py").read_text(encoding="utf-8")
README = ROOT / "README.md"

MATPLOTLIB = "matplotlib>=3.7"
EXTRAS = {
    "cpu": ["paddlepaddle>=3.3,<3.4"],
    "gpu": ["paddlepaddle-gpu>=3.3,<3.4"],
    "visualdl": ["visualdl>=2.5"],
    "tensorboard": ["tensorboardX>=2.6"],
    "digits": ["scikit-learn>=1.3"],
    "video": ["av>=17.0"],
    "pi07": ["scipy>=1.11"],
    "dev": [
        "av>=17.0",
        "hypothesis>=6.90",
        "jinja2>=3.1",
        "psutil>=5.9",
        "pytest>=8.0",
        "pytest-xdist>=3.5",
        "ruff==0.17.*",
        "scikit-learn>=1.3",
        "scipy>=1.11",
        "tensorboardX>=2.6",
        "visualdl>=2.5",
    ],
}

setup(
    name="paddle-vl",
    version=re.search(r'^__version__ = "(.+)"$', INIT, re.MULTILINE).group(1),
    description="Vision-language models and vision-language-action policies for PaddlePaddle",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    # Wheels of paddlepaddle 3.3 are there for 3.9 to 3.13.
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["paddle_vl", "paddle_vl.*"]),
    package_data={"paddle_vl.report": ["assets/*"]},
    install_requires=[
        MATPLOTLIB,
        "numpy>=1.24",
        "pillow>=10.0",
        "pydantic>=2.5,<3",
        "pyyaml>=6.0",
        "safetensors>=0.4",
        "tokenizers>=0.19",
        "tqdm>=4.65",
        "xxhash>=3.4",
    ],
    extras_require={**EXTRAS, "viz": [MATPLOTLIB, *EXTRAS["visualdl"], *EXTRAS["tensorboard"]]},
    entry_points={"console_scripts": ["paddle-vl = paddle_vl.cli.main:run"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
