"""Write the quickstart's data set of handwritten digits: images, conversations and a processor."""

import argparse

from digits import make_digits_dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="where to write; nothing is done when it is complete")
    directory = parser.parse_args().directory
    written = make_digits_dataset(directory)
    print(f"{directory}: {'written' if written else 'complete already'}")


if __name__ == "__main__":
    main()
