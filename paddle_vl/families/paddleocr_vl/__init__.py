"""The PaddleOCR-VL family: documents to text, tables, formulas, charts and spotted lines."""
