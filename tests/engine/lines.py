"""A line without an engine: frames go straight to endpoints in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedtmle.deploy.demo import write_example
from fedtmle.engine import frames
from fedtmle.engine.coordinate import Seal
from fedtmle.engine.frames import Answer, Declined, Reply
from fedtmle.engine.runs import Move, RunFolder, Terms, server_key, sites
from fedtmle.engine.site import Endpoint, open_endpoint
from fedtmle.errors import DeadlineError, RefusedError
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from tests.homes import home_at

ALGORITHMS = {
    "Coded": 'kind = "Coded"',
    "Adaptive": 'kind = "Adaptive"',
    "Gradient": 'kind = "Gradient"\ntolerance = 1e-8',
    "LocalAverage": 'kind = "LocalAverage"',
    "Personalized": 'kind = "Personalized"',
}


class DirectLine:
    """What `FlareFederation` does, without FLARE."""

    def __init__(self, endpoints: Mapping[str, Endpoint], seal: Seal = lambda frame: frame) -> None:
        self.endpoints = dict(endpoints)
        self.seal = seal

    @property
    def silos(self) -> Sequence[str]:
        return tuple(self.endpoints)

    def ask(self, asked: Mapping[str, bytes], *, timeout: float) -> dict[str, Answer]:
        assert timeout > 0
        return {
            silo: frames.read_answer(self.endpoints[silo].step(self.seal(frame)))
            for silo, frame in asked.items()
        }

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        replies = {}
        for silo, answer in self.ask({s: frames.request(r) for s, r in requests.items()}, timeout=1).items():
            if isinstance(answer, Declined):
                raise RefusedError(silo, answer.value)
            if not isinstance(answer, Reply):
                raise DeadlineError((silo,), 1.0)
            replies[silo] = answer.data
        return replies


def study_of(folder: Path, algorithm: str = "Coded", hospitals: int = 3) -> StudyFile:
    return read_study(write_example(folder / "hospitals", hospitals, algorithm=ALGORITHMS[algorithm]))


def going_on(study: StudyFile) -> StudyFile:
    """The same study, which goes on without silos that refuse or are absent when it opens."""
    text = study.path.read_text()
    study.path.write_text(text.replace("[silos]", '[options]\non_refusal = "go on"\n\n[silos]'))
    return read_study(study.path)


def approve(study: StudyFile, *silos: str, approved: bool = True) -> None:
    for silo in silos or study.silos:
        home_at(study.silos[silo]).approvals.decide(file_plan(study).digest, approved=approved)


def kit_of(folder: Path, study: StudyFile, silo: str) -> Path:
    """A silo's own part of its kit, with the path of its silo file."""
    kit = folder / "kits" / sites(study.silos)[silo]
    kit.mkdir(parents=True, exist_ok=True)
    (kit / "silo.json").write_text(f'{{"silo_file": "{study.silos[silo]}"}}')
    return kit


OPENED: list[Endpoint] = []  # `conftest` closes them


def opened(end: Endpoint) -> Endpoint:
    OPENED.append(end)
    return end


def endpoint(folder: Path, study: StudyFile, silo: str, *, plan: bytes | None = None) -> Endpoint:
    text = study.path.read_bytes()
    announced = file_plan(study).digest if plan is None else plan
    return opened(open_endpoint(kit_of(folder, study, silo), sites(study.silos)[silo], text, announced))


def line(
    folder: Path,
    study: StudyFile,
    silos: Iterable[str] | None = None,
    seal: Seal = lambda frame: frame,
) -> DirectLine:
    """A line to these silos of a study, by default to all."""
    return DirectLine({silo: endpoint(folder, study, silo) for silo in silos or study.silos}, seal)


def pinned(folder: Path, study: StudyFile) -> StudyFile:
    """The study with the key of the server whose runs are in ``folder`` / runs."""
    text = study.path.read_text()
    study.path.write_text(f'{text}\n[plan]\nserver = "{server_key(folder).public.hex()}"\n')
    return read_study(study.path)


def new_folder(folder: Path, study: StudyFile, *, patience: float = 60.0) -> RunFolder:
    plan = file_plan(study).digest.hex()
    goes_on = study.study.on_refusal == "go on"
    terms = Terms(plan=plan, sites=sites(study.silos), deadline=5.0, patience=patience, goes_on=goes_on)
    made = RunFolder.new(folder / "runs", study, terms)
    made.move(Move.START)
    return made
