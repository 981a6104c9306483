"""The PaddleOCR-VL family: document recognition with a SigLIP tower and an ERNIE 4.5 decoder."""
