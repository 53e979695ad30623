//! What is said when memory runs out: who asked, who has it, and what would make room.

use fsdp_core::Error;
use fsdp_core::memory::{Bytes, Category, Usage};

use crate::error::DeviceError;

/// The error of an allocation for `category`, with what this rank has in use.
pub(super) fn explain(error: DeviceError, category: Category, usage: &Usage) -> Error {
    let what = match error {
        DeviceError::OutOfMemory { bytes, free, total } => format!(
            "no room for {} of device memory: {} of {} of the GPU are free; {}. {}",
            size(bytes),
            size(free),
            size(total),
            in_use(&usage.device),
            remedy(category)
        ),
        DeviceError::OutOfPinnedMemory { bytes } => format!(
            "no room for {} of pinned memory of the host; {}. fsdp.offload = \"none\" needs hardly any, and SGD \
             without momentum has no state to keep there; a limit of locked memory (ulimit -l) or of a container may be \
             the cause",
            size(bytes),
            in_use(&usage.host)
        ),
        other => return other.into(),
    };
    Error::Memory { category: Some(category), what }
}

/// What a rank has in use of one kind of memory, by category.
pub(crate) fn in_use(bytes: &Bytes) -> String {
    let live = Category::ALL.iter().filter(|category| bytes.live(**category) > 0);
    let live: Vec<String> =
        live.map(|category| format!("{category} {}", size(bytes.live(*category)))).collect();
    let live = if live.is_empty() { "nothing".to_owned() } else { live.join(", ") };
    format!("in use or asked for by this rank: {live}")
}

/// What makes room on a device for a category.
pub(crate) fn remedy(category: Category) -> &'static str {
    match category {
        Category::Activation | Category::Workspace => {
            "A smaller micro-batch makes room, activation checkpointing too; and offloading shards to the host"
        }
        Category::Unsharded | Category::GradientSlot => {
            "Smaller units (fsdp.wrap) or less prefetching make room; a smaller micro-batch and offloading shards too"
        }
        _ => {
            "More ranks, offloading shards to the host, a smaller micro-batch or activation checkpointing make room"
        }
    }
}

/// Bytes for people.
fn size(bytes: usize) -> String {
    const UNITS: [&str; 4] = ["bytes", "KiB", "MiB", "GiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} bytes") } else { format!("{value:.1} {}", UNITS[unit]) }
}
