"""A checkpoint's own chat template: found, rendered in a sandbox, and turned into ids and labels.

`template_files` finds the template of a folder, `environment` runs it, `messages` and `rendering`
give it a row and check that no text of the row is lost, `answer_spans` finds the learned characters
and `encoding` makes token ids and labels. No module here needs Paddle.
"""
