//! Detects the CPU architecture of a library.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The architecture of a library, if it differs from this machine's.
pub(super) fn foreign_architecture(path: &Path) -> Option<String> {
    let mut header = [0; 20];
    File::open(path).and_then(|mut file| file.read_exact(&mut header)).ok()?;
    let architecture = machine(&header)?;
    (architecture != std::env::consts::ARCH).then_some(architecture)
}

/// Reads `e_machine` from the header of an ELF file; `None` for other files.
fn machine(header: &[u8; 20]) -> Option<String> {
    if !header.starts_with(b"\x7fELF") {
        return None;
    }
    // The sixth byte is the byte order: 1 is little endian.
    let number = [header[18], header[19]];
    let number = if header[5] == 1 { u16::from_le_bytes(number) } else { u16::from_be_bytes(number) };
    Some(match number {
        3 => "x86".to_owned(),
        21 => "powerpc64".to_owned(),
        22 => "s390x".to_owned(),
        62 => "x86_64".to_owned(),
        183 => "aarch64".to_owned(),
        243 => "riscv64".to_owned(),
        other => format!("machine {other} of ELF"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elf_header_gives_machine_name() {
        let mut header = [0; 20];
        assert_eq!(machine(&header), None);
        header[..4].copy_from_slice(b"\x7fELF");
        (header[5], header[18]) = (1, 183);
        assert_eq!(machine(&header).as_deref(), Some("aarch64"));
        (header[5], header[18], header[19]) = (2, 0, 22);
        assert_eq!(machine(&header).as_deref(), Some("s390x"));
    }
}
