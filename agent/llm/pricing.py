"""What tokens cost. The table is data; settings override it; a model that is not known costs 0 and says so.

US dollars for a million tokens, as the vendors listed them at the end of 2025. Prices change: set
`llm.price_prompt_usd_per_mtok` and its two siblings for a binding budget.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent.llm.model import Usage
from agent.settings import LLMSettings


@dataclass(frozen=True)
class Price:
    """US dollars for a million tokens. `known` is false for a model that no table and no setting names."""

    prompt: float
    cached: float
    completion: float
    known: bool = True

    def usd(self, usage: Usage) -> float:
        fresh = max(usage.prompt_tokens - usage.cached_tokens, 0)
        total = fresh * self.prompt + usage.cached_tokens * self.cached + usage.completion_tokens * self.completion
        return total / 1_000_000


UNKNOWN = Price(0.0, 0.0, 0.0, known=False)

TABLE = {
    "gpt-4o": Price(2.50, 1.25, 10.00),
    "gpt-4o-mini": Price(0.15, 0.075, 0.60),
    "gpt-4.1": Price(2.00, 0.50, 8.00),
    "gpt-4.1-mini": Price(0.40, 0.10, 1.60),
    "gpt-4.1-nano": Price(0.10, 0.025, 0.40),
    "gpt-5": Price(1.25, 0.125, 10.00),
    "gpt-5-mini": Price(0.25, 0.025, 2.00),
    "gpt-5-nano": Price(0.05, 0.005, 0.40),
    "o3": Price(2.00, 0.50, 8.00),
    "o4-mini": Price(1.10, 0.275, 4.40),
    "claude-opus-4-5": Price(5.00, 0.50, 25.00),
    "claude-sonnet-4-5": Price(3.00, 0.30, 15.00),
    "claude-haiku-4-5": Price(1.00, 0.10, 5.00),
    "gemini-2.5-pro": Price(1.25, 0.125, 10.00),
    "gemini-2.5-flash": Price(0.30, 0.03, 2.50),
    "deepseek-chat": Price(0.28, 0.028, 0.42),
    "deepseek-reasoner": Price(0.28, 0.028, 0.42),
}

# A dated or tagged edition of a model costs what the model costs; any other suffix is another model.
_EDITION = re.compile(r"(?:-(?:\d{4}-\d{2}-\d{2}|\d{8}|\d{4}|latest|preview)|:[\w.-]+)+\Z")


def price_of(model: str, settings: LLMSettings) -> Price:
    """Settings before table. Where a prompt price is set and no cached one, cached tokens cost as much as others."""
    listed = TABLE.get(_EDITION.sub("", model.rsplit("/", 1)[-1].lower()), UNKNOWN)
    prompt, cached, completion = (
        settings.price_prompt_usd_per_mtok,
        settings.price_cached_usd_per_mtok,
        settings.price_completion_usd_per_mtok,
    )
    if prompt is None and cached is None and completion is None:
        return listed
    prompt = listed.prompt if prompt is None else prompt
    if cached is None:
        cached = prompt if settings.price_prompt_usd_per_mtok is not None else listed.cached
    known = listed.known or (settings.price_prompt_usd_per_mtok is not None and completion is not None)
    return Price(prompt, cached, listed.completion if completion is None else completion, known)


def unpriced(settings: LLMSettings) -> list[str]:
    """The models of these settings whose price nobody knows."""
    names = {settings.model or "", *settings.role_models.values()} - {""}
    return sorted(name for name in names if not price_of(name, settings).known)
