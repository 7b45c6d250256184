"""Questions to the API about sessions and their environments.

Removed files do not come back, so a session that is missing is asked about twice.
"""

from __future__ import annotations

import asyncio

import openai
from openai.resources.beta.agents import AsyncAgents
from openai.types.beta.agent_session import AgentSession

# Questions at a time.
QUESTIONS = 8
# A missing session is asked about again after this time: a proxy or a deployment in front of the
# API may answer 404 for a while.
CONFIRM_SECONDS = 60.0
# Sessions on a page of the list, the most that the API gives.
PAGE = 100
# Pages of the list. The sessions of a larger project are never taken for deleted.
PAGES = 1000


class Contradiction(ValueError):
    """Answers of the API that do not fit together."""


class Deleted(Exception):
    """A session does not exist any more."""


class Questions:
    """The API, as far as sessions are asked about; limits the questions at a time."""

    def __init__(self, agents: AsyncAgents, confirm: float = CONFIRM_SECONDS) -> None:
        self._agents = agents
        self._confirm = confirm
        self._places = asyncio.Semaphore(QUESTIONS)

    async def session(self, session_id: str) -> AgentSession:
        """Ask about a session; raises Deleted, OpenAIError, or ValueError for an unusable answer.

        Takes `confirm` seconds if the session is missing: only a second 404 and a list without the
        session mean that it was deleted.
        """
        try:
            return await self._retrieve(session_id)
        except openai.NotFoundError:
            await asyncio.sleep(self._confirm)
        try:
            return await self._retrieve(session_id)
        except openai.NotFoundError as error:
            if await self._is_listed(session_id):
                raise Contradiction("it is missing, but listed") from None
            raise Deleted from error

    async def has_expired(self, environment_id: str) -> bool:
        """Whether an environment has expired; false if it is missing. Raises as above."""
        try:
            async with self._places:
                found = await self._agents.environments.retrieve(environment_id)
        except openai.NotFoundError:
            return False  # the question about its session decides
        return getattr(found, "status", None) == "expired"

    async def _retrieve(self, session_id: str) -> AgentSession:
        async with self._places:
            return await self._agents.sessions.retrieve(session_id)

    async def _is_listed(self, session_id: str) -> bool:
        async with self._places:
            try:
                return await self._search(session_id)
            except (AttributeError, TypeError):  # the package does not check answers
                raise Contradiction("it is missing, and the list of sessions is none") from None

    async def _search(self, session_id: str) -> bool:
        page = await self._agents.sessions.list(limit=PAGE)
        for _ in range(PAGES):
            if not isinstance(page.data, list):
                raise TypeError
            if any(each.id == session_id for each in page.data):
                return True
            if not page.has_next_page():
                return False
            page = await page.get_next_page()
        raise Contradiction("it is missing, but the list of sessions is too long to be sure")
