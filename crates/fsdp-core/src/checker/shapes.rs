//! Checks of lengths, dtypes and places of operands.

use super::{Names, Violation};
use crate::layout::Segment;
use crate::schedule::{BufferId, Op, OpKind, Place, Role};

/// Checks that shards have the lengths of the layout.
pub(super) fn check_shards(names: Names<'_>) -> Result<(), Violation> {
    for (index, decl) in names.schedule.buffers.iter().enumerate() {
        let (Role::Master | Role::Low | Role::ShardedGradient, Some(unit), Some(segment)) =
            (decl.role, decl.unit, decl.segment)
        else {
            continue;
        };
        let expected = names.layout.unit(unit).segments.get(segment.0).map(Segment::shard_len);
        if decl.len != expected {
            return Err(misfit(names, 0, BufferId::of(index), format!("{expected:?} elements")));
        }
    }
    Ok(())
}

/// Checks that the operands of an operation match each other; their number is already checked.
pub(super) fn check(names: Names<'_>, at: usize, op: &Op) -> Result<(), Violation> {
    let size = |group| names.schedule.mesh.group_size(group);
    let (device, host) = (Place::Device, Place::Host);
    // A written buffer is `times` times as long as one of the `parts` parts of the buffer read; `places` are of both.
    let (times, parts, places) = match op.kind {
        OpKind::Upload(_) => (1, 1, [host, device]),
        OpKind::Download(_) => (1, 1, [device, host]),
        OpKind::AllGather { group, .. } | OpKind::GatherDirections { group, .. } => {
            (size(group), 1, [device; 2])
        }
        OpKind::KeepSubShard { group, .. } | OpKind::ReduceScatter { group, .. } => {
            (1, size(group), [device; 2])
        }
        OpKind::Add { .. } => (1, 1, [device; 2]),
        OpKind::Update(_) | OpKind::Direct(_) | OpKind::Statistics { .. } => {
            return check_update(names, at, op);
        }
        _ => return Ok(()),
    };
    for (&read, &write) in op.reads.iter().zip(&op.writes) {
        let (from, to) = (names.schedule.buffer(read), names.schedule.buffer(write));
        let fits = to.len.map(|len| len * parts) == from.len.map(|len| len * times) && to.dtype == from.dtype;
        if !fits || [from.place, to.place] != places {
            let expected =
                format!("{times}/{parts} the length of buffer {}, from/to {places:?}", names.buffer(read));
            return Err(misfit(names, at, write, expected));
        }
    }
    Ok(())
}

/// Checks that gradients have the length and place of the parameters, and that scratch has their dtype and is on the
/// device.
fn check_update(names: Names<'_>, at: usize, op: &Op) -> Result<(), Violation> {
    let of_role = |ids: &[BufferId], role| -> Vec<BufferId> {
        ids.iter().copied().filter(|&id| names.schedule.buffer(id).role == role).collect()
    };
    let masters = of_role(&op.writes, Role::Master);
    for (scratch, &master) in of_role(&op.writes, Role::Scratch).into_iter().zip(&masters) {
        let (found, shard) = (names.schedule.buffer(scratch), names.schedule.buffer(master));
        if (found.dtype, found.place) != (shard.dtype, Place::Device) {
            return Err(misfit(names, at, scratch, format!("{} on the device", shard.dtype)));
        }
    }
    for (gradient, master) in of_role(&op.reads, Role::ShardedGradient).into_iter().zip(masters) {
        let (found, shard) = (names.schedule.buffer(gradient), names.schedule.buffer(master));
        if found.len != shard.len || found.place != shard.place {
            let expected = format!("the length and place of buffer {}", names.buffer(master));
            return Err(misfit(names, at, gradient, expected));
        }
    }
    Ok(())
}

fn misfit(names: Names<'_>, at: usize, buffer: BufferId, expected: String) -> Violation {
    Violation::Misfit { op: names.op(at), buffer: names.buffer(buffer), expected }
}
