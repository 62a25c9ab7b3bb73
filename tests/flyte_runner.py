"""Executes what was registered: each attempt of a task is its container's own command, in its own process.

A model of what Flyte's propeller does with a graph, written from its documented behaviour, not propeller:
nodes run as soon as their inputs exist, dynamic nodes and launch plans expand, mapped tasks fan out, and
attempts that fail are repeated within one budget for every cause (``ignore-retry-cause`` in
``configs/cluster/flyte.yaml``), of which the last is not interruptible. Not here: Kubernetes, caching,
time-outs, offloading, attribute access.
"""

import os
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyteidl.core import dynamic_job_pb2, errors_pb2, literals_pb2

Literals = literals_pb2.LiteralMap
SPOT_GRACE = 75.0


class NodeFailed(Exception):
    """A node used up its attempts, or failed in a way that is not repeated."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one attempt of a task ended."""

    node: str
    number: int
    is_spot: bool
    outcome: str
    """``ok``, ``system`` (its pod was lost), ``user`` (recoverable), ``permanent`` or ``no outputs``."""
    message: str
    started: float
    ended: float


Preempt = Callable[[str, int], signal.Signals | None]
"""Node and process of a running attempt -> the signal it gets now, or None."""


@dataclass(kw_only=True)
class Runner:
    """Runs registered entities; ``folder`` gets inputs, outputs and logs of every attempt."""

    tasks: dict[str, Any]
    workflows: dict[str, Any]
    launch_plans: dict[str, Any]
    folder: Path
    root: Path
    """The unpacked code, where a pod has /root."""
    preempt: Preempt = lambda node, process: None
    num_parallel: int = 3
    attempts: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._slots = threading.Semaphore(self.num_parallel)

    def launch(self, name: str, inputs: Literals, path: Path | None = None) -> Literals:
        """A launch plan with its defaults and fixed inputs."""
        plan, found = self.launch_plans[name], Literals()
        for key, parameter in plan.default_inputs.parameters.items():
            if parameter.HasField("default"):
                found.literals[key].CopyFrom(parameter.default)
        for given in (inputs.literals, plan.fixed_inputs.literals):
            for key, value in given.items():
                found.literals[key].CopyFrom(value)
        workflow = self.workflows[plan.workflow_id.name]
        return self.graph(path or Path(name), workflow.nodes, workflow.outputs, found, self.tasks)

    def graph(self, path: Path, nodes: Any, outputs: Any, inputs: Literals, tasks: dict) -> Literals:
        """Every node as soon as the nodes before it are done."""
        done: dict[str, Literals] = {"start-node": inputs, "": inputs}
        todo = {node.id: node for node in nodes if node.id not in ("start-node", "end-node")}
        running: dict[Any, str] = {}
        with ThreadPoolExecutor(max_workers=64) as threads:
            while todo or running:
                for name, node in list(todo.items()):
                    if set(node.upstream_node_ids) - {"start-node"} <= done.keys():
                        given = Literals(literals={b.var: _bound(b.binding, done) for b in node.inputs})
                        running[threads.submit(self.node, path / name, node, given, tasks)] = name
                        del todo[name]
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    done[running.pop(future)] = future.result()
        return Literals(literals={b.var: _bound(b.binding, done) for b in outputs})

    def node(self, path: Path, node: Any, inputs: Literals, tasks: dict) -> Literals:
        kind = node.WhichOneof("target")
        if kind == "task_node":
            return self.task(path, tasks[node.task_node.reference_id.name], node.metadata, inputs)
        if kind == "array_node":
            return self.array(path, node.array_node, inputs, tasks)
        assert kind == "workflow_node", kind
        return self.launch(node.workflow_node.launchplan_ref.name, inputs, path)

    def array(self, path: Path, array: Any, inputs: Literals, tasks: dict) -> Literals:
        """A mapped task: one node an element, results in their order; those that failed are None."""
        template = tasks[array.node.task_node.reference_id.name]
        mapped = [v for name, v in inputs.literals.items() if name not in array.bound_inputs]
        size = max(len(value.collection.literals) for value in mapped)

        def one(index: int) -> Literals | NodeFailed:
            try:
                return self.task(path / str(index), template, array.node.metadata, inputs, index=index)
            except NodeFailed as failed:
                return failed

        with ThreadPoolExecutor(max_workers=array.parallelism or size) as threads:
            results = list(threads.map(one, range(size)))
        good = [result for result in results if isinstance(result, Literals)]
        ratio = array.min_success_ratio if array.HasField("min_success_ratio") else 1.0
        if len(good) < ratio * size:
            raise NodeFailed(f"{path}: {len(good)} of {size} succeeded")
        found = Literals()
        for name, variable in template.interface.outputs.variables.items():
            union = variable.type.collection_type.union_type
            values = found.literals[name].collection.literals
            for result in results:
                value = values.add()
                if not isinstance(result, Literals):
                    value.scalar.union.value.scalar.none_type.SetInParent()
                    value.scalar.union.type.CopyFrom(union.variants[-1])
                elif union.variants and not result.literals[name].scalar.HasField("union"):
                    value.scalar.union.value.CopyFrom(result.literals[name])
                    value.scalar.union.type.CopyFrom(union.variants[0])
                else:
                    value.CopyFrom(result.literals[name])
        return found

    def task(
        self, path: Path, template: Any, metadata: Any, inputs: Literals, index: int | None = None
    ) -> Literals:
        """Attempts until one succeeds; one budget for every cause, its last attempt on demand."""
        last = metadata.retries.retries
        for number in range(last + 1):
            is_spot = metadata.interruptible and number < last
            folder = self.folder / path / f"attempt-{number}"
            start = time.monotonic()
            outcome, message = self._attempt(path, template, inputs, folder, number, is_spot, index)
            self.attempts.append(
                Attempt(str(path), number, is_spot, outcome, message, start, time.monotonic())
            )
            if outcome == "ok":
                return self._outputs(path, folder, template)
            if outcome == "permanent":
                break
        raise NodeFailed(f"{path}: {message}\n{(folder / 'log').read_text()[-3000:]}")

    def _outputs(self, path: Path, folder: Path, template: Any) -> Literals:
        found = Literals()
        if (folder / "out/futures.pb").exists():
            job = dynamic_job_pb2.DynamicJobSpec()
            job.ParseFromString((folder / "out/futures.pb").read_bytes())
            tasks = {**self.tasks, **{task.id.name: task for task in job.tasks}}
            return self.graph(path, job.nodes, job.outputs, Literals(), tasks)
        found.ParseFromString((folder / "out/outputs.pb").read_bytes())
        return found

    def _attempt(
        self, path: Path, template: Any, inputs: Literals, folder: Path, number: int, is_spot: bool,
        index: int | None,
    ) -> tuple[str, str]:  # fmt: skip
        folder.mkdir(parents=True)
        (folder / "inputs.pb").write_bytes(inputs.SerializeToString())
        container = template.k8s_pod.pod_spec["containers"][0]
        values = {
            "{{.input}}": str(folder / "inputs.pb"), "{{.outputPrefix}}": str(folder / "out"),
            "{{.rawOutputDataPrefix}}": str(folder / "raw"),
            "{{.checkpointOutputPrefix}}": str(folder / "ck"),
            "{{.prevCheckpointPrefix}}": '""',
        }  # fmt: skip
        command = [values.get(argument, argument) for argument in container["args"]]
        if command[0] == "pyflyte-fast-execute":  # its archive was unpacked once, for all attempts
            command = command[command.index("--") + 1 :]
        environment = self._environment(container, number, index)
        with self._slots, (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            code = self._watch(process, str(path))
        return classified(code, folder / "out")

    def _environment(self, container: Any, number: int, index: int | None) -> dict[str, str]:
        of_pod = {entry["name"]: entry["value"] for entry in container["env"]}
        assert of_pod["PYTHONPATH"] == "/root:/root/kernels"
        found = {
            **os.environ,
            "PYTHONPATH": of_pod["PYTHONPATH"].replace("/root", str(self.root)),
            "OMP_NUM_THREADS": "1",
            "FLYTE_INTERNAL_EXECUTION_ID": "run", "FLYTE_INTERNAL_EXECUTION_PROJECT": "moe",
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": "production", "FLYTE_ATTEMPT_NUMBER": str(number),
        }  # fmt: skip
        if index is not None:
            found |= {"BATCH_JOB_ARRAY_INDEX_VAR_NAME": "INDEX", "INDEX": str(index)}
        return found

    def _watch(self, process: subprocess.Popen, node: str) -> int:
        """Until it ends; a preemption as Kubernetes does it: SIGTERM to the main process, SIGKILL to all."""
        killed_at = None
        while process.poll() is None:
            time.sleep(0.05)
            number_of_signal = None if killed_at else self.preempt(node, process.pid)
            if number_of_signal == signal.SIGTERM:
                process.send_signal(signal.SIGTERM)
            if number_of_signal:
                killed_at = time.monotonic()
            overdue = killed_at and time.monotonic() - killed_at > SPOT_GRACE
            if number_of_signal == signal.SIGKILL or overdue:
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def classified(code: int, out: Path) -> tuple[str, str]:
    """What propeller makes of an exit code and the files: never a success without outputs."""
    if code in (-signal.SIGKILL, 128 + signal.SIGKILL):
        return "system", f"exit {code}"
    if (out / "error.pb").exists():
        document = errors_pb2.ErrorDocument()
        document.ParseFromString((out / "error.pb").read_bytes())
        error = document.error
        is_recoverable = error.kind == errors_pb2.ContainerError.RECOVERABLE
        return ("user" if is_recoverable else "permanent"), error.message.strip()
    if code:
        return "user", f"exit {code}"
    if (out / "futures.pb").exists() or (out / "outputs.pb").exists():
        return "ok", ""
    return "no outputs", "exit 0 without outputs"


def _bound(binding: Any, done: dict[str, Literals]) -> Any:
    kind = binding.WhichOneof("value")
    if kind == "scalar":
        return literals_pb2.Literal(scalar=binding.scalar)
    if kind == "collection":
        items = [_bound(item, done) for item in binding.collection.bindings]
        return literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=items))
    assert kind == "promise" and not binding.promise.attr_path, kind
    return done[binding.promise.node_id].literals[binding.promise.var]


def num_descendants(process: int) -> int:
    """Children of a process, their children and so on; a trainer's ranks are children of its server."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return 0
    return sum(1 + num_descendants(int(child)) for child in children)


def unpacked(archive: Path, folder: Path) -> Path:
    """The registered code as a pod would have it in /root."""
    with tarfile.open(archive) as found:
        found.extractall(folder, filter="data")
    return folder
