"""A FlyteAdmin on loopback: Flyte's own services, as far as its client registers, activates and launches.

It stores what it is sent and starts nothing; ``flyte_runner.py`` executes what it stored. Not here: users,
the compiler, the scheduler, the count of concurrent executions.
"""

import base64
import os
import threading
import uuid
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
from flyteidl.admin import execution_pb2, launch_plan_pb2, project_pb2, task_pb2, version_pb2, workflow_pb2
from flyteidl.core import compiler_pb2, identifier_pb2
from flyteidl.core import execution_pb2 as phases
from flyteidl.service import admin_pb2_grpc, auth_pb2, auth_pb2_grpc, dataproxy_pb2, dataproxy_pb2_grpc

VERSION = "1.16.8"


def _key(identifier: Any) -> tuple[str, str]:
    return identifier.name, identifier.version


def _plain(spec: Any) -> Any:
    """Without an order that has no meaning: flytekit lists the nodes before a node as a set does."""
    copy = type(spec)()
    copy.CopyFrom(spec)
    for node in getattr(getattr(copy, "template", None), "nodes", ()):
        node.upstream_node_ids.sort()
    return copy


class Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, version: str = VERSION) -> None:
        self.tasks: dict[tuple[str, str], Any] = {}
        self.workflows: dict[tuple[str, str], Any] = {}
        self.launch_plans: dict[tuple[str, str], Any] = {}
        self.executions: dict[str, Any] = {}
        self.active: set[tuple[str, str]] = set()
        self.version = version

    @staticmethod
    def _store(where: dict, request: Any, context: grpc.ServicerContext) -> None:
        if _key(request.id) in where and _plain(where[_key(request.id)].spec) != _plain(request.spec):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this version exists with another structure")
        if _key(request.id) in where:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "exists")
        where[_key(request.id)] = request

    @staticmethod
    def _find(where: dict, request: Any, context: grpc.ServicerContext) -> Any:
        if _key(request.id) not in where:
            context.abort(grpc.StatusCode.NOT_FOUND, f"{request.id.name} {request.id.version}")
        return where[_key(request.id)]

    def GetVersion(self, request, context):
        return version_pb2.GetVersionResponse(control_plane_version=version_pb2.Version(Version=self.version))

    def CreateTask(self, request, context):
        self._store(self.tasks, request, context)
        return task_pb2.TaskCreateResponse()

    def CreateWorkflow(self, request, context):
        self._store(self.workflows, request, context)
        return workflow_pb2.WorkflowCreateResponse()

    def CreateLaunchPlan(self, request, context):
        self._store(self.launch_plans, request, context)
        return launch_plan_pb2.LaunchPlanCreateResponse()

    def UpdateLaunchPlan(self, request, context):
        self._find(self.launch_plans, request, context)
        changed = self.active.add if request.state == launch_plan_pb2.ACTIVE else self.active.discard
        changed(_key(request.id))
        return launch_plan_pb2.LaunchPlanUpdateResponse()

    def GetTask(self, request, context):
        found = self._find(self.tasks, request, context)
        compiled = compiler_pb2.CompiledTask(template=found.spec.template)
        return task_pb2.Task(id=found.id, closure=task_pb2.TaskClosure(compiled_task=compiled))

    def GetWorkflow(self, request, context):
        found = self._find(self.workflows, request, context)
        version = request.id.version
        closure = compiler_pb2.CompiledWorkflowClosure(
            primary=compiler_pb2.CompiledWorkflow(template=found.spec.template),
            tasks=[
                compiler_pb2.CompiledTask(template=task.spec.template)
                for (_, registered), task in self.tasks.items()
                if registered == version
            ],
        )
        return workflow_pb2.Workflow(
            id=found.id, closure=workflow_pb2.WorkflowClosure(compiled_workflow=closure)
        )

    def GetLaunchPlan(self, request, context):
        found = self._find(self.launch_plans, request, context)
        workflow = self.workflows[_key(found.spec.workflow_id)].spec.template
        closure = launch_plan_pb2.LaunchPlanClosure(
            expected_inputs=found.spec.default_inputs, expected_outputs=workflow.interface.outputs
        )
        return launch_plan_pb2.LaunchPlan(id=found.id, spec=found.spec, closure=closure)

    def CreateExecution(self, request, context):
        name = request.name or f"f{uuid.uuid4().hex[:19]}"
        self.executions[name] = request
        found = identifier_pb2.WorkflowExecutionIdentifier(
            project=request.project, domain=request.domain, name=name
        )
        return execution_pb2.ExecutionCreateResponse(id=found)

    def GetExecution(self, request, context):
        closure = execution_pb2.ExecutionClosure(phase=phases.WorkflowExecution.QUEUED)
        return execution_pb2.Execution(
            id=request.id, spec=self.executions[request.id.name].spec, closure=closure
        )

    def ListProjects(self, request, context):
        return project_pb2.Projects()


class _DataProxy(dataproxy_pb2_grpc.DataProxyServiceServicer):
    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port

    def CreateUploadLocation(self, request, context):
        name = base64.b32encode(request.content_md5).decode().strip("=") or request.filename_root
        path = self.folder / name / request.filename
        return dataproxy_pb2.CreateUploadLocationResponse(
            signed_url=f"http://127.0.0.1:{self.port}{path}", native_url=str(path)
        )


class _Metadata(auth_pb2_grpc.AuthMetadataServiceServicer):
    def GetPublicClientConfig(self, request, context):
        return auth_pb2.PublicClientAuthConfigResponse()

    def GetOAuth2Metadata(self, request, context):
        return auth_pb2.OAuth2MetadataResponse()


@contextmanager
def admin_on_loopback(folder: Path, *, version: str = VERSION) -> Iterator[tuple[Admin, dict[str, str]]]:
    """A running admin and the environment that points Flyte's client at it; uploads go to ``folder``."""

    class Uploads(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            path = Path(self.path)
            assert path.is_relative_to(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    uploads = ThreadingHTTPServer(("127.0.0.1", 0), Uploads)
    threading.Thread(target=uploads.serve_forever, daemon=True).start()
    server, admin = grpc.server(futures.ThreadPoolExecutor(4)), Admin(version)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(_DataProxy(folder, uploads.server_port), server)
    auth_pb2_grpc.add_AuthMetadataServiceServicer_to_server(_Metadata(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        address = {"FLYTE_PLATFORM_URL": f"127.0.0.1:{port}", "FLYTE_PLATFORM_INSECURE": "true"}
        yield admin, {**os.environ, **address}
    finally:
        server.stop(0)
        uploads.shutdown()
        uploads.server_close()
