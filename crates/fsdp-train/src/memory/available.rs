//! The memory that this process may still allocate: the least of what the machine has left, what its control groups
//! allow, and what the limit on its address space allows.
//!
//! Cached pages of files count as available, although a control group counts them as used: the kernel reclaims them
//! before it refuses an allocation. All values come from files of Linux; a file that cannot be read imposes no limit.

use std::fs;
use std::path::{Path, PathBuf};

/// The memory that is left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Available {
    /// Number of bytes.
    pub(crate) bytes: u64,
    /// The source of this limit.
    pub(crate) limit: Limit,
}

/// A source of a memory limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Limit {
    /// The memory of the machine.
    #[error("this machine")]
    Machine,
    /// A control group: of a container, or of a job with a limit.
    #[error("the control group {}", .0.display())]
    ControlGroup(PathBuf),
    /// The limit on the process's address space.
    #[error("the limit on the address space (ulimit -v)")]
    AddressSpace,
}

impl Available {
    /// Determines what is left now; `None` if no limit can be read.
    pub(crate) fn now() -> Option<Self> {
        Self::under(Path::new("/"))
    }

    /// Like [`Available::now`], on a machine whose root directory is `root`.
    fn under(root: &Path) -> Option<Self> {
        let proc = root.join("proc");
        let meminfo = fs::read_to_string(proc.join("meminfo")).unwrap_or_default();
        let kib = |key| number_after(&meminfo, key).map(|kib| kib.saturating_mul(1024));
        let swap = kib("SwapFree:").unwrap_or(0);
        let machine = kib("MemAvailable:").map(|bytes| (bytes.saturating_add(swap), Limit::Machine));
        let groups = control_groups(root, &proc).into_iter().filter_map(|group| {
            let left = group.available_bytes()?.saturating_add(swap);
            Some((left, Limit::ControlGroup(group.dir)))
        });
        let space = address_space(&proc).map(|bytes| (bytes, Limit::AddressSpace));
        let all = machine.into_iter().chain(groups).chain(space);
        all.min_by_key(|(bytes, _)| *bytes).map(|(bytes, limit)| Self { bytes, limit })
    }
}

/// The two versions of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// The control group of this process, or one that contains it.
struct ControlGroup {
    version: Version,
    dir: PathBuf,
}

impl ControlGroup {
    /// Bytes that the group leaves; `None` if it has no limit.
    fn available_bytes(&self) -> Option<u64> {
        let read = |file: &str| fs::read_to_string(self.dir.join(file)).ok();
        let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
        let (limit, used) = match self.version {
            Version::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            Version::V2 => ("memory.max", "memory.current"),
        };
        // Without a limit, version 1 reports a number near 2^63, and version 2 a word.
        let limit = number(limit).filter(|&limit| limit < 1 << 62)?;
        let used = number(used)?;
        let stat = read("memory.stat").unwrap_or_default();
        let prefix = if self.version == Version::V1 { "total_" } else { "" };
        let cached =
            ["active_file", "inactive_file"].map(|key| number_after(&stat, &format!("{prefix}{key}")));
        let cached: u64 = cached.into_iter().flatten().sum();
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
}

/// The control groups that limit this process: its own and all that contain it, of both versions.
fn control_groups(root: &Path, proc: &Path) -> Vec<ControlGroup> {
    let read = |file: &str| fs::read_to_string(proc.join("self").join(file)).unwrap_or_default();
    let (membership, mounts) = (read("cgroup"), read("mountinfo"));
    let mut groups = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let version = match controllers {
            "" => Version::V2,
            list if list.split(',').any(|name| name == "memory") => Version::V1,
            _ => continue,
        };
        let Some((mount_root, mount_point)) = mounts.lines().find_map(|line| mount(line, version)) else {
            continue;
        };
        let mount_point = root.join(mount_point.strip_prefix("/").unwrap_or(mount_point));
        // A container may see only a part of the tree; groups outside of it cannot be read.
        let inside = Path::new(path).strip_prefix(mount_root).unwrap_or(Path::new(""));
        let dirs = inside.ancestors().map(|inside| mount_point.join(inside));
        groups.extend(dirs.map(|dir| ControlGroup { version, dir }));
    }
    groups
}

/// Which part of a version's tree a line of `mountinfo` mounts, and where.
fn mount(line: &str, version: Version) -> Option<(&Path, &Path)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (mount_root, mount_point) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    let found = match (kind.next()?, version) {
        ("cgroup2", Version::V2) => true,
        ("cgroup", Version::V1) => kind.nth(1)?.split(',').any(|option| option == "memory"),
        _ => false,
    };
    found.then_some((Path::new(mount_root), Path::new(mount_point)))
}

/// Bytes that the limit on the address space leaves; `None` if there is no limit.
fn address_space(proc: &Path) -> Option<u64> {
    let limits = fs::read_to_string(proc.join("self/limits")).ok()?;
    let status = fs::read_to_string(proc.join("self/status")).ok()?;
    let limit = number_after(&limits, "Max address space")?;
    Some(limit.saturating_sub(number_after(&status, "VmSize:")?.saturating_mul(1024)))
}

/// The number after a key at the beginning of a line; `None` if it is not a number.
fn number_after(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?;
        rest.starts_with(char::is_whitespace).then_some(rest)
    });
    rest?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests;
