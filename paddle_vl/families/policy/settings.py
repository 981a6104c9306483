"""Settings that runs of policies share. Read without Paddle and NumPy."""

from typing import Annotated

from pydantic import Field

from paddle_vl.config.section import Section

_Probability = Annotated[float, Field(ge=0, le=1)]


class DropProbabilities(Section):
    """Probabilities of leaving optional fields out of a training sample; OpenTau's names and
    defaults."""

    history_state_drop_prob: _Probability = 0.3
    """probability of dropping the past: its frames become black and count as padding; the state
    stays and the policy masks it"""
    subgoal_drop_prob: _Probability = 0.75
    """probability of dropping the goal images of all cameras"""
    response_drop_prob: _Probability = 0.3
    """probability of dropping the response of a sample that keeps its goal images; without goal
    images the response stays, since it tells the policy the next step"""
    metadata_drop_all_prob: _Probability = 0.15
    """probability of dropping all metadata but fps"""
    metadata_drop_each_prob: _Probability = 0.05
    """probability of dropping each metadata field, if not all are dropped"""
