use tempfile::TempDir;

use super::*;

const MIB: u64 = 1 << 20;

/// The system files of a machine.
struct Machine {
    root: TempDir,
}

impl Machine {
    /// A machine with 1000 MiB available and no limits.
    fn new() -> Self {
        let machine = Self { root: tempfile::tempdir().unwrap() };
        machine.write("proc/meminfo", "MemTotal: 2048000 kB\nMemAvailable: 1024000 kB\nSwapFree: 0 kB\n");
        machine
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.root.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn unified(self, membership: &str, mounted: &str) -> Self {
        self.write("proc/self/cgroup", &format!("0::{membership}\n"));
        let mount =
            format!("30 23 0:26 {mounted} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n");
        self.write("proc/self/mountinfo", &mount);
        self
    }

    fn group(&self, dir: &str, limit: &str, used: u64, cached: u64) {
        let at = |file: &str| format!("sys/fs/cgroup{dir}/{file}");
        self.write(&at("memory.max"), &format!("{limit}\n"));
        self.write(&at("memory.current"), &format!("{used}\n"));
        self.write(&at("memory.stat"), &format!("anon 7\nfile 9\ninactive_file {cached}\nactive_file 0\n"));
    }

    /// The MiB that are left, and the source of the limit, relative to the machine's root.
    fn left(&self) -> (u64, String) {
        let Available { bytes, limit } = Available::under(self.root.path()).unwrap();
        (bytes / MIB, limit.to_string().replace(&self.root.path().display().to_string(), ""))
    }
}

#[test]
fn without_limits_machine_memory_and_swap_are_available() {
    let machine = Machine::new();
    assert_eq!(machine.left(), (1000, "this machine".into()));
    machine.write("proc/meminfo", "MemAvailable: 1024000 kB\nSwapFree: 102400 kB\n");
    assert_eq!(machine.left(), (1100, "this machine".into()));
}

#[test]
fn missing_proc_files_set_no_limit() {
    assert_eq!(Available::under(tempfile::tempdir().unwrap().path()), None);
    assert!(Available::now().is_some_and(|available| available.bytes > 0), "Linux does say something");
}

#[test]
fn tightest_nested_cgroup_decides() {
    let machine = Machine::new().unified("/jobs/mine/inner", "/");
    assert_eq!(machine.left(), (1000, "this machine".into()));
    machine.group("/jobs/mine/inner", "max", 100 * MIB, 0);
    machine.group("/jobs/mine", "max", 100 * MIB, 0);
    machine.group("/jobs", &(500 * MIB).to_string(), 200 * MIB, 0);
    assert_eq!(machine.left(), (300, "the control group /sys/fs/cgroup/jobs".into()));
    machine.group("/jobs/mine", &(350 * MIB).to_string(), 100 * MIB, 0);
    assert_eq!(machine.left(), (250, "the control group /sys/fs/cgroup/jobs/mine".into()));
    // A group that has used more than its limit leaves nothing.
    machine.group("/jobs/mine/inner", &MIB.to_string(), 2 * MIB, 0);
    assert_eq!(machine.left().0, 0);
}

#[test]
fn cached_files_do_not_count_as_used() {
    let machine = Machine::new().unified("/jobs", "/");
    machine.group("/jobs", &(500 * MIB).to_string(), 490 * MIB, 400 * MIB);
    assert_eq!(machine.left().0, 410);
}

#[test]
fn container_is_limited_by_visible_cgroups() {
    let machine = Machine::new().unified("/docker/abc/inner", "/docker/abc");
    machine.group("/inner", "max", 0, 0);
    machine.group("", &(64 * MIB).to_string(), 4 * MIB, 0);
    assert_eq!(machine.left().0, 60);
    // In a separate namespace, the process's own group is the root, and groups outside of the mount are not visible.
    for membership in ["/", "/../../elsewhere"] {
        let machine = Machine::new().unified(membership, "/");
        machine.group("", &(64 * MIB).to_string(), 4 * MIB, 0);
        assert_eq!(machine.left().0, 60, "{membership}");
    }
}

#[test]
fn cgroup_v1_limits_apply() {
    let machine = Machine::new();
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/slice/job\n0::/\n");
    let mounts = "31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                  32 30 0:28 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
    machine.write("proc/self/mountinfo", mounts);
    let group = |dir: &str, limit: u64, used: u64| {
        let at = |file: &str| format!("sys/fs/cgroup/memory{dir}/{file}");
        machine.write(&at("memory.limit_in_bytes"), &limit.to_string());
        machine.write(&at("memory.usage_in_bytes"), &used.to_string());
        machine
            .write(&at("memory.stat"), "inactive_file 1\ntotal_inactive_file 1048576\ntotal_active_file 0\n");
    };
    group("", 9_223_372_036_854_771_712, 900 * MIB);
    group("/slice", 300 * MIB, 101 * MIB);
    group("/slice/job", 9_223_372_036_854_771_712, 100 * MIB);
    assert_eq!(machine.left(), (200, "the control group /sys/fs/cgroup/memory/slice".into()));
}

#[test]
fn address_space_limit_counts_mapped_memory() {
    let machine = Machine::new();
    machine.write("proc/self/status", "Name:\tfsdp\nVmPeak:\t 999999 kB\nVmSize:\t  102400 kB\n");
    let limits = |soft: &str| {
        let head = "Limit                     Soft Limit           Hard Limit           Units     \n";
        format!("{head}Max address space         {soft:<20} unlimited            bytes     \n")
    };
    machine.write("proc/self/limits", &limits("unlimited"));
    assert_eq!(machine.left().0, 1000);
    machine.write("proc/self/limits", &limits(&(600 * MIB).to_string()));
    assert_eq!(machine.left(), (500, "the limit on the address space (ulimit -v)".into()));
}
