"""STAND-IN. Contract of `Qwen3VLTextEmbedding` in `src/paddlefleet/models/qwen3_vl/embedding.py`: a
`GPTEmbedding` that joins the levels of images and videos by their places, so that it takes both.
"""

import paddle
from paddlefleet.models.gpt.gpt_embedding import GPTEmbedding


class Qwen3VLTextEmbedding(GPTEmbedding):
    def _joint(self, mask, found, image, video):
        joint = paddle.zeros([int(mask.sum()), image.shape[-1]], dtype=image.dtype)
        joint[found["image"][mask]] = image
        joint[found["video"][mask]] = video
        return joint
