//! No room for a buffer: who asked for how much of which memory, and who has it.

use std::fmt;

use crate::memory::{Bytes, Category};

/// Which memory is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// That of a device.
    Device,
    /// That of the host which a device can reach.
    Pinned,
    /// That of the host.
    Host,
}

/// There is no room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// In which memory.
    pub kind: MemoryKind,
    /// What it was for.
    pub category: Category,
    /// How much was asked for; a library may not tell.
    pub bytes: Option<usize>,
    /// Who has it: what is free, and what this rank or process has in use.
    pub in_use: String,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, category, bytes, in_use } = self;
        let kind = match kind {
            MemoryKind::Device => "device memory",
            MemoryKind::Pinned => "pinned memory of the host",
            MemoryKind::Host => "host memory",
        };
        match bytes {
            Some(bytes) => write!(f, "no room for {} of {kind} for {category}: {in_use}", Size(*bytes)),
            None => write!(f, "no room in {kind} for {category}: {in_use}"),
        }
    }
}

/// What a rank has in use of one kind of memory, by category, for people.
pub fn in_use(bytes: &Bytes) -> String {
    let live = Category::ALL.iter().filter(|category| bytes.live(**category) > 0);
    let live: Vec<String> =
        live.map(|category| format!("{category} {}", Size(bytes.live(*category)))).collect();
    let live = if live.is_empty() { "nothing".to_owned() } else { live.join(", ") };
    format!("in use or asked for by this rank: {live}")
}

/// Bytes for people.
#[derive(Clone, Copy, Debug)]
pub struct Size(pub usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 7] = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text =
            if unit == 0 { format!("{} bytes", self.0) } else { format!("{value:.1} {}", UNITS[unit]) };
        f.pad(&text)
    }
}
