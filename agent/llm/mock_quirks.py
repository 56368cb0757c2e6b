"""A quirk of a scripted model: a way in which real servers and models misbehave, as a switch. List: docs/reference/mock-scripts.md.

Three kinds: a refusal answers instead of the reply and a damage changes what the server writes (`mock_faults`); a distortion
changes what the model says (`mock_distortions`).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Quirk(BaseModel):
    """A switch by name with what it needs. `turns` bounds it to the first turns of a conversation, `sends` to the first
    sends of one request; None: always.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sends: int | None = Field(None, ge=1)
    turns: int | None = Field(None, ge=1)
    seconds: float = Field(3600.0, ge=0)  # of never_answers and stalls; until a Retry-After that is a date
    retry_after: str | None = None  # sent as it stands: "2", "garbage"; "date": an HTTP date in `seconds`
    status: int = Field(500, ge=400, le=599)  # of server_error
    chars: int = Field(0, ge=0)  # context overflow: prompts longer than this; huge_text: its length
    after: int = Field(2, ge=0)  # frames before a fault in mid-stream
    count: int = Field(3, ge=1)  # of parallel calls
    seed: int = 0  # of noise
