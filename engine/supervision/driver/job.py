"""The driver's decisions: the desired state of each host's agent, from reports, the journal and a clock.

This module does no I/O, so that tests can simulate agents and clock. Decisions take effect through `Effects`. Those
that must outlive the driver are written to the journal first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from signal import SIGTERM, Signals
from typing import Any

from weft.conf.schema import CommConfig, SuperviseConfig
from weft.engine.supervision.agent.processes import DOCTOR_S
from weft.engine.supervision.driver.detector import FailureDetector
from weft.engine.supervision.driver.fleet import Fleet, Host
from weft.engine.supervision.driver.hosts import Layout
from weft.engine.supervision.driver.limits import Deadlines, Fault, SiteTimeout, Suspicions, reason_to_evict
from weft.engine.supervision.driver.state import Effects, JobState, Stage, StopRequest
from weft.engine.supervision.messages import AgentMessage, DesiredState, FaultKind, from_fields

STOPS_S = 10.0
"""Seconds in which a run must end after the ranks' own deadline."""
SLEPT_S = 3.0
"""Seconds between two ticks from which this process itself counts as stopped in between."""
HOSTS_S = 2.0
"""Seconds between checks of the deny-list and of hosts that may have returned."""


class Job(JobState):
    """A run, from its start to its end, over any number of attempts. It makes the driver's decisions."""

    def __init__(
        self,
        *,
        settings: SuperviseConfig,
        layouts: Callable[[int, Collection[str], Mapping[str, int] | None], Layout],
        effects: Effects,
        target: str,
        link_deadline_s: float = CommConfig.deadline_s,
        sites: Sequence[Collection[str]] = (),
        past: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Restore the state from the journal. Nothing starts before `launch` or `attach`.

        Args:
            layouts: returns the layout of an attempt from its number, the excluded hosts and the previous slots.
            target: ``module:function`` that a rank runs.
            link_deadline_s: seconds that a transfer between sites may stand still.
        """
        timeout = SiteTimeout(max(link_deadline_s, settings.silence_s), self._goes_on_without)
        super().__init__(settings, Fleet(effects.start_agent, effects.record, effects.say, sites=sites), timeout)
        self._layouts, self._effects, self._target = layouts, effects, target
        self._link_deadline_s = link_deadline_s
        self._deadlines = Deadlines(least_s=settings.least_deadline_s, setup_s=settings.setup_deadline_s)
        self._ticked: float | None = None
        self._resume_at = self._hosts_at = 0.0
        self._drop: list[int] | None = None
        self._grows_after: tuple[str, int] | None = None
        self._reason, self._waiting = "restart", ""
        self._suspicions, self._suspect = Suspicions(), ""
        self._detect_anew(0.0)
        for event in past:
            try:
                self.replay(event)
            except (KeyError, TypeError, ValueError, AttributeError) as error:  # a damaged journal
                effects.say(f"journal: {event.get('event')} is not understood: {error!r}")
        self._site_timeout.began(None)  # because that time is by another driver's clock

    def _detect_anew(self, now: float) -> None:
        self._detector = FailureDetector(
            attempt=self.attempt,
            layout=self._layout,
            fleet=self.fleet,
            effects=self._effects,
            settings=self._settings,
            deadlines=self._deadlines,
            link_deadline_s=self._link_deadline_s,
            site_timeout=self._site_timeout,
            now=now,
        )

    def _record(self, event: str, now: float, **fields: Any) -> None:
        self._effects.record(event, **fields)
        self.replay({"event": event, "at": now, **fields})

    # Beginning

    def launch(self, now: float) -> None:
        """Start a run. Raise ValueError if the hosts do not suffice for one replica."""
        self._record("launch", now)
        self.fleet.follow(self._effects.denied(), now)
        self._begin_attempt("start", now)

    def attach(self, now: float) -> None:
        """Continue a run whose driver has ended. Its agents must report within the timeout of hosts."""
        self._detect_anew(now)
        self.fleet.attach(now)
        if self.stage is Stage.starting:
            self.fleet.start_missing(self._layout.slots, now)

    def _begin_attempt(self, reason: str, now: float) -> None:
        before = self._layout.slots or None
        try:
            layout = self._layouts(self.attempt + 1, set(self.fleet.away), before)
        except ValueError as error:
            if reason == "start":
                raise
            if self._stop_request is not None:
                return self._end_stopped("while the run waited for hosts")
            away = "".join(f"; {host}: {why}" for host, why in self.fleet.away.items())
            text = f"waiting for hosts: {str(error).splitlines()[-1]}{away}"
            if text != self._waiting:
                self._effects.say(text)
            self._waiting, self._resume_at = text, now + HOSTS_S
            return
        self._waiting = ""
        adapted = self.adapted if before in (None, layout.slots) else ()
        self._record(
            "attempt",
            now,
            attempt=self.attempt + 1,
            reason=self.kind_of_start(reason, layout),
            ranks={str(rank): host for host, ranks in layout.ranks.items() for rank in ranks},
            slots=dict(layout.slots),
            master=list(layout.master),
            arguments=[*layout.arguments, *adapted],
        )
        self._grows_after = None
        self._detect_anew(now)
        self.fleet.start_missing(layout.slots, now)
        self._assign_all()

    def _assign_all(self) -> None:
        for name in self.fleet.hosts:
            self._assign(name)

    def _assign(self, name: str) -> None:
        ranks = self._layout.ranks.get(name, [])
        address, port = self._layout.master
        state = DesiredState(
            attempt=self.attempt,
            run=bool(ranks) and self.stage in (Stage.starting, Stage.running),
            ranks=ranks,
            target=self._target,
            arguments=list(self._layout.arguments),
            environment={"WORLD_SIZE": str(self._layout.num_ranks), "MASTER_ADDR": address, "MASTER_PORT": str(port)},
            in_process=self._settings.in_process,
            drop=self._drop,
            stop=self._stop_request.signal if self._stop_request is not None else 0,
            examine=self.stage is Stage.examining and name == self._suspect,
        )
        self._effects.send_state(name, self.fleet.hosts[name].generation, state)

    # Messages of agents

    def on_connected(self, name: str, generation: int, now: float) -> None:
        """Handle the first or a repeated connection of an agent.

        An agent that was started in addition to another one reports only after that one has had time to reconnect.
        """
        waits = self.stage is not Stage.ended and self.fleet.is_additional(name, generation)
        if not waits and self._accept(name, generation) is not None:
            self.fleet.saw_connection(name, now)
            self._assign(name)

    def _accept(self, name: str, generation: int) -> Host | None:
        """Return the host of an agent that has reported, or None if the agent must end. It is then notified."""
        host = self.fleet.accept(name, generation)
        if host is None or self.stage is Stage.ended:
            # This agent was given up, and may have been replaced.
            self._effects.send_state(name, generation, DesiredState(end=True, replaced=host is None))
            return None
        return host

    def on_lost(self, name: str, generation: int) -> None:
        """Handle the end of a connection. The agent may reconnect."""
        host = self.fleet.of_agent(name, generation)
        if host is not None:
            host.connected = False

    def on_exit(self, name: str, generation: int, now: float) -> None:
        """Handle the end of the process by which this driver started an agent.

        The agent has ended, too, unless it was silent before, because ssh also ends when the link fails.
        """
        host = self.fleet.of_agent(name, generation)
        if host is not None and (host.attempt is None or now - host.reported_at <= self._settings.silence_s):
            host.exited = True

    def on_report(self, name: str, generation: int, message: Mapping[str, Any], now: float) -> None:
        """Process an agent's heartbeat. Raise ValueError if the message has an invalid form."""
        waited = self.fleet.is_additional(name, generation)
        host = self._accept(name, generation)
        if host is None:
            return
        if waited:
            self.fleet.saw_connection(name, now)
            self._assign(name)
        received = from_fields(message, AgentMessage)
        if received.attempt > self.attempt:  # attempts are missing from the journal
            self.attempt = received.attempt
            self._stop("restart", None, now)
        host.connected, host.ready, host.reported_at = True, received.ready, now
        host.attempt, host.standby, host.leaving = received.attempt, dict(received.standby), received.leaving
        host.codes = {rank.rank: rank.exit_code for rank in received.report.ranks}
        if received.attempt == self.attempt and self.stage in (Stage.starting, Stage.running):
            self._detector.observe(received, now)
            self._note_progress(now)
        if self.stage is Stage.examining and name == self._suspect and received.examined == self.attempt:
            self._take_results(name, received.failed, now)

    def _note_progress(self, now: float) -> None:
        if self._detector.progress.has_finished:
            self.end(0, "every rank has finished")
        if self.stage is Stage.starting and self._site_timeout.is_importing and self._detector.progress.has_imported:
            self._record("imported", now, attempt=self.attempt)
        if self.stage is Stage.starting and self._detector.progress.has_stepped:
            self._record("good_step", now, attempt=self.attempt, step=self._detector.step)

    # Timers

    def tick(self, now: float) -> None:
        """Check all deadlines. Call this about ten times a second."""
        if self._ticked is not None and now - self._ticked > SLEPT_S:
            self.fleet.attach(now)  # this process was stopped, so it may have missed reports
        self._ticked = now
        if self._stop_request is not None and now >= self._stop_request.limit and self.stage is not Stage.ended:
            self._end_stopped("and not every rank has ended in time")
        if self.stage in (Stage.starting, Stage.running, Stage.stopping):
            self.fleet.replace_unseen(self._layout.slots, now)
        if self.stage in (Stage.starting, Stage.running):
            fault = self._detector.fault(now)
            if self._detector.has_stopped:
                self._take_stop(now)
            elif fault is not None:
                self._take_fault(fault, now)
            elif now >= self._hosts_at + HOSTS_S and self._stop_request is None:
                self._follow_hosts(now)
        slots, silence_s = self._layout.slots, self._settings.silence_s
        if self.stage is Stage.stopping and self.fleet.have_stopped(slots, self.attempt, silence_s, now):
            self._examine_or_restart(now)
        if self.stage is Stage.examining and now >= self._resume_at:
            self._take_results(self._suspect, ["its agent did not answer"], now)
        if self.stage is Stage.restarting and now >= self._resume_at:
            self.fleet.follow(self._effects.denied(), now)
            self._begin_attempt(self._reason, now)

    def _examine_or_restart(self, now: float) -> None:
        suspect = self._suspicions.take()
        if suspect is not None and self.fleet.hosts[suspect].connected and len(self.fleet.hosts) > 1:
            self._suspect, self.stage, self._resume_at = suspect, Stage.examining, now + 2 * DOCTOR_S
            self._effects.say(f"examining host {suspect}, whose ranks keep on failing")
            self._assign(suspect)
        else:
            self._wait_to_restart(now)

    def _wait_to_restart(self, now: float) -> None:
        self._resume_at = now + (self._budget.wait_s() if self._reason == "restart" else 0.0)
        self.stage = Stage.restarting

    def _take_results(self, host: str, failed: Sequence[str], now: float) -> None:
        if failed:
            self._effects.deny(host, reason_to_evict(failed))
            self.fleet.evict(host, reason_to_evict(failed))
        self._wait_to_restart(now)

    def _next_layout(self, without: Collection[str] = ()) -> Layout | None:
        """Return the next attempt's layout without some hosts, or None if it is not possible, or storage hangs."""
        try:
            return self._layouts(self.attempt + 1, set(self.fleet.away) | set(without), self._layout.slots)
        except ValueError:
            return None

    def _goes_on_without(self, hosts: Collection[str]) -> bool:
        return self._next_layout(hosts) is not None

    def _has_spares_for(self, hosts: Collection[str]) -> bool:
        """True if the run keeps its number of ranks without these hosts."""
        layout = self._next_layout(hosts)
        return layout is not None and layout.num_ranks == self._layout.num_ranks

    # Ending early

    def stop(self, number: int, deadline_s: float, now: float, *, memory: bool) -> None:
        """Let every rank end after its step with a checkpoint, and then end the run.

        Args:
            number: number of the signal that requests the end.
            deadline_s: seconds after which the run ends even if ranks have not.
            memory: whether memory checkpoints may hold steps that storage lacks. A run between two attempts then
                starts another attempt to save them.
        """
        self._effects.record("stop", signal=number, memory=memory)
        self._stop_request = StopRequest(number, now + deadline_s, memory)
        if self.stage in (Stage.starting, Stage.running):
            self._assign_all()
        elif not memory:
            self._end_stopped("between two attempts")
        self._resume_at = min(self._resume_at, now)

    def _take_stop(self, now: float) -> None:
        """End the run or restart it, after every rank has ended because of a signal."""
        leaving = [name for name in self._layout.slots if self.fleet.hosts[name].leaving]
        if self._stop_request is None and (len(leaving) == len(self._layout.slots) or self._settings.enabled is False):
            self._stop_request = StopRequest(SIGTERM, inf, False)
        if self._stop_request is not None:
            return self._end_stopped()
        for name in leaving:
            self.fleet.let_go(name, now)
        culprit = {"hosts": leaving} if leaving else {}
        text = "a signal has asked it to end" if leaving else "a signal has asked the ranks to end, and not the run"
        self._take_fault(Fault("stopped", culprit, text, self._detector.step, 0.0), now)

    def _end_stopped(self, text: str = "") -> None:
        assert self._stop_request is not None
        newest, number = self._effects.newest_checkpoint(), self._stop_request.signal
        where = f"`weft launch` with the same settings resumes from {newest}" if newest else "there is no checkpoint"
        self.end(128 + number, f"{f'stopped by {Signals(number).name} {text}'.strip()}; {where}")

    # Faults, and changes of hosts

    def _take_fault(self, fault: Fault, now: float) -> None:
        self._effects.record(
            "fault",
            attempt=self.attempt,
            kind=fault.kind,
            culprit=dict(fault.culprit),
            seconds=round(fault.seconds, 3),
            evidence=fault.evidence,
            step=fault.step,
            lines=self._detector.last_lines(fault.culprit),
        )
        undone = self.undo()
        same = self._budget.saw_fault(fault.kind, fault.culprit, fault.step)
        if self._stop_request is not None and not self._stop_request.memory:
            self._end_stopped(f"after {fault.text}")
            return
        end = self._budget.end(fault, same)
        if undone:
            self._effects.say(f"going on without {' '.join(undone)}")
        elif end is not None:
            printed = any(fault.evidence in line for line in self._detector.last_lines(fault.culprit))
            self.end(*end, reported=printed and fault.kind == FaultKind.input_error.value)
            return
        self._effects.say(f"attempt {self.attempt}: {fault.text}")
        self._suspicions.saw_fault(fault.kind, fault.culprit)
        if fault.kind == "host":
            self.fleet.lose_site(fault.culprit["host"], self._layout.slots, self._settings.silence_s, now)
        if fault.kind in ("agent", "host") and fault.culprit["host"] not in self.fleet.away:
            self.fleet.give_up(fault.culprit["host"])
        # If a restart in the same processes has not led to a good step, new processes may.
        keeps = self._settings.in_process and self._budget.fruitless == 1
        self._stop(
            "restart", [fault.culprit["rank"]] if keeps and "rank" in fault.culprit else [] if keeps else None, now
        )

    def _stop(self, reason: str, drop: list[int] | None, now: float) -> None:
        """End the attempt and restart for ``reason``. Processes of the ranks in ``drop`` end. None ends all."""
        self.stage, self._reason, self._drop = Stage.stopping, reason, drop
        self.fleet.start_missing(self._layout.slots, now)
        self._assign_all()

    def _follow_hosts(self, now: float) -> None:
        """Restart with returned hosts, as soon as there is a newer checkpoint in storage or in memory."""
        self._hosts_at = now
        self.fleet.follow(self._effects.denied(), now)
        if self.stage is Stage.running:
            self._adapt(now)
        if self.stage is not Stage.running or self._layout.num_ranks >= self._most_ranks:
            return
        newest = self._effects.newest_checkpoint(), self._detector.kept_step
        if self._grows_after is None:
            layout = self._next_layout()
            if layout is not None and layout.num_ranks > self._layout.num_ranks:
                self._grows_after = newest
        elif newest != self._grows_after:
            self._effects.say("hosts have returned; going on with them from the newest checkpoint")
            self._stop("grow", [] if self._settings.in_process else None, now)

    def _adapt(self, now: float) -> None:
        """Restart with what ranks have planned to change, as soon as there is a newer checkpoint.

        A spare takes the place of a slow host if one waits. Otherwise settings change.
        """
        following = self._effects.next_attempt()
        if following is None:
            return
        newest = self._effects.newest_checkpoint().rpartition("-")[2]
        if max(int(newest or 0), self._detector.kept_step) <= following.after_step:
            return
        slow = {host for host, ranks in self._layout.ranks.items() if {*ranks} & {*following.slow_ranks}}
        if slow and self._has_spares_for(slow):
            for host in slow:
                self._effects.deny(host, f"slow: {following.reason}")
                self.fleet.evict(host, f"slow: {following.reason}")
            change = f"without {', '.join(sorted(slow))}"
        elif following.arguments and not self.has_undone:
            self._record("adapt", now, arguments=list(following.arguments))
            change = f"with {' '.join(following.arguments)}"
        else:
            return
        self._effects.say(f"adapt: {following.reason}; going on {change} from the newest checkpoint")
        self._stop("adapt", [] if self._settings.in_process else None, now)

    def end(self, code: int, reason: str, *, reported: bool = False) -> None:
        """End the run. Every agent ends its ranks and itself.

        Args:
            reported: whether the reason has been printed.
        """
        if self.stage is Stage.ended:
            return
        self.stage, self.code = Stage.ended, code
        self._effects.record("end", code=code, reason=reason)
        if code and not reported:
            self._effects.say(reason)
        for name, host in self.fleet.hosts.items():
            self._effects.send_state(name, host.generation, DesiredState(end=True))
