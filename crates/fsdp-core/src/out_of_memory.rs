//! The out-of-memory error: how much was requested, for what, from which memory, and who uses that memory.

use std::fmt;

use crate::usage::{Bytes, Category};

/// Which memory is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory of the device.
    Device,
    /// Pinned host memory, which a device can access.
    Pinned,
    /// Host memory.
    Host,
}

/// A request for memory that could not be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The memory that is full.
    pub kind: MemoryKind,
    /// The category of the requested buffer.
    pub category: Category,
    /// Bytes requested; `None` if a library does not report them.
    pub bytes: Option<usize>,
    /// The free memory, and the memory in use by this rank or process.
    pub in_use: String,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, category, bytes, in_use } = self;
        let kind = match kind {
            MemoryKind::Device => "device memory",
            MemoryKind::Pinned => "pinned host memory",
            MemoryKind::Host => "host memory",
        };
        match bytes {
            Some(bytes) => write!(f, "no room for {} of {kind} for {category}: {in_use}", Size(*bytes)),
            None => write!(f, "no room in {kind} for {category}: {in_use}"),
        }
    }
}

/// Describes a rank's use of one kind of memory by category, human-readable.
pub fn in_use(bytes: &Bytes) -> String {
    let live = Category::ALL.iter().filter(|category| bytes.live(**category) > 0);
    let live: Vec<String> =
        live.map(|category| format!("{category} {}", Size(bytes.live(*category)))).collect();
    let live = if live.is_empty() { "nothing".to_owned() } else { live.join(", ") };
    format!("in use or requested by this rank: {live}")
}

/// A number of bytes that displays in a human-readable unit.
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
