"""What workers say of themselves to protobuf and back, in pairs."""

from __future__ import annotations

from dataclasses import asdict

from common.rpc.gen.pdserve.v1 import registry_pb2, work_pb2
from common.work import Compatibility, PageCounts, WorkerLoad, WorkerProfile, role_of


def compatibility_to_pb(value: Compatibility) -> work_pb2.Compatibility:
    return work_pb2.Compatibility(**asdict(value))


def compatibility_from_pb(pb: work_pb2.Compatibility) -> Compatibility:
    return Compatibility(**{field.name: getattr(pb, field.name) for field in pb.DESCRIPTOR.fields})


def profile_to_pb(profile: WorkerProfile) -> registry_pb2.WorkerProfile:
    return registry_pb2.WorkerProfile(
        worker_id=profile.worker_id,
        role=profile.role,
        address=profile.address,
        compatibility=compatibility_to_pb(profile.compatibility),
        device=profile.device,
        total_pages=profile.total_pages,
        max_running=profile.max_running,
        version=profile.version,
        local_prefill=profile.local_prefill,
        chunk_tokens=profile.chunk_tokens,
        local_prefill_tokens=profile.local_prefill_tokens,
        max_requests=profile.max_requests,
    )


def profile_from_pb(pb: registry_pb2.WorkerProfile) -> WorkerProfile:
    """Raises ValueError on a role that is neither prefill nor decode."""
    return WorkerProfile(
        worker_id=pb.worker_id,
        role=role_of(pb.role),
        address=pb.address,
        compatibility=compatibility_from_pb(pb.compatibility),
        device=pb.device,
        total_pages=pb.total_pages,
        max_running=pb.max_running,
        version=pb.version,
        local_prefill=pb.local_prefill,
        chunk_tokens=pb.chunk_tokens,
        local_prefill_tokens=pb.local_prefill_tokens,
        max_requests=pb.max_requests,
    )


def load_to_pb(load: WorkerLoad) -> registry_pb2.WorkerLoad:
    return registry_pb2.WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        free_pages=load.pages.free,
        held_pages=load.pages.held,
        cached_pages=load.pages.cached,
        quarantined_pages=load.pages.quarantined,
        draining=load.draining,
    )


def load_from_pb(pb: registry_pb2.WorkerLoad) -> WorkerLoad:
    counts = (pb.free_pages, pb.held_pages, pb.cached_pages, pb.quarantined_pages)
    return WorkerLoad(pb.running, pb.waiting, pb.queued_tokens, PageCounts(*counts, total=sum(counts)), pb.draining)
