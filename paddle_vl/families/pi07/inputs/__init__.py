"""From raw observations and demonstrations to model inputs. NumPy only; runs in loader workers."""
