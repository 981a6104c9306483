"""Parts of this package inside other training frameworks; each imports its framework when used."""
