//! What is said when memory runs out: who asked, who has it, and what would make room.

use fsdp_core::Error;
use fsdp_core::memory::{Category, Usage};

use crate::error::DeviceError;

/// The error of an allocation for `category`, with what this rank has in use.
pub(super) fn explain(error: DeviceError, category: Category, usage: &Usage) -> Error {
    let DeviceError::OutOfMemory { bytes, place, free, total } = error else { return error.into() };
    let in_use = Category::ALL.iter().filter(|category| usage.live(**category) > 0);
    let in_use: Vec<String> =
        in_use.map(|category| format!("{category} {}", size(usage.live(*category)))).collect();
    let what = format!(
        "no room for {} of {place} memory: {} of {} of the GPU are free; in use or asked for by this rank: {}. {}",
        size(bytes),
        size(free),
        size(total),
        in_use.join(", "),
        remedy(category)
    );
    Error::Memory { category: Some(category), what }
}

fn remedy(category: Category) -> &'static str {
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
