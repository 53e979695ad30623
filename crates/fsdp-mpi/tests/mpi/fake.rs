//! Builds the fake MPI library once per family, and worlds over it.
#![expect(unsafe_code, reason = "it calls the C functions of the stand-in")]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fsdp_comm::{Alarm, Link};
use fsdp_core::Rank;
use fsdp_core::comm::CommError;
use fsdp_mpi::{Family, MpiLibrary, MpiWorld};
use libloading::os::unix::Library;

/// A time limit that no test reaches.
pub(crate) const LONG: Duration = Duration::from_secs(600);

pub(crate) const FAMILIES: [Family; 3] = [Family::OpenMpi, Family::Mpich, Family::Standard];

/// An alarm that the ranks share.
#[derive(Default)]
pub(crate) struct SharedAlarm(Mutex<Option<CommError>>);

impl Alarm for SharedAlarm {
    fn raise(&self, error: CommError) {
        self.0.lock().unwrap().get_or_insert(error);
    }

    fn raised(&self) -> Option<CommError> {
        self.0.lock().unwrap().clone()
    }
}

/// Ranks that are connected by the fake MPI.
pub(crate) struct Worlds {
    pub(crate) ranks: Vec<MpiWorld>,
    pub(crate) alarm: Arc<SharedAlarm>,
    library: Library,
    universe: *mut c_void,
}

// SAFETY: all functions that take the universe lock it.
unsafe impl Send for Worlds {}
// SAFETY: as for `Send`.
unsafe impl Sync for Worlds {}

impl Worlds {
    /// Creates a world of `size` ranks.
    pub(crate) fn new(family: Family, size: usize, timeout: Duration) -> Self {
        // Worlds are created one at a time, because ranks are numbered in the order in which they initialize MPI.
        static BEGINNING: Mutex<u64> = Mutex::new(0);
        let mut seed = BEGINNING.lock().unwrap_or_else(PoisonError::into_inner);
        *seed += 1;
        let file = compiled(family);
        // SAFETY: the fake MPI has no initializers.
        let library = unsafe { Library::new(&file) }.unwrap();
        type Begin = unsafe extern "C" fn(c_int, u64) -> *mut c_void;
        // SAFETY: this is the type of `fake_begin`.
        let universe = unsafe { library.get::<Begin>(b"fake_begin").unwrap()(size as c_int, *seed) };
        let alarm = Arc::new(SharedAlarm::default());
        let open = |rank| {
            let library = MpiLibrary::open(&file).unwrap();
            assert_eq!(library.family(), family);
            let world = MpiWorld::open(library, timeout, alarm.clone()).unwrap();
            assert_eq!((world.rank(), world.size()), (Rank(rank), size));
            world
        };
        let ranks = (0..size).map(open).collect();
        Self { ranks, alarm, library, universe }
    }

    /// Returns a link between all ranks.
    pub(crate) fn link(&self, channel: u64, rank: usize) -> Box<dyn Link> {
        self.ranks[rank].link(channel, (0..self.ranks.len()).map(Rank).collect())
    }

    /// Holds long messages: they start to move but do not end until this is called with `false`.
    pub(crate) fn hold(&self, held: bool) {
        self.set(b"fake_hold", c_int::from(held));
    }

    /// Stops the delivery of empty messages.
    pub(crate) fn deafen(&self) {
        self.set(b"fake_deafen", 1);
    }

    /// Number of empty messages sent.
    pub(crate) fn empty(&self) -> usize {
        self.ask(b"fake_empty")
    }

    /// Makes the next send of a rank fail.
    pub(crate) fn fail_call(&self, rank: usize) {
        self.set(b"fake_fail_call", rank as c_int);
    }

    /// Makes the next long message to a rank fail when it ends.
    pub(crate) fn fail_message(&self, rank: usize) {
        self.set(b"fake_fail_message", rank as c_int);
    }

    /// Number of long messages that have started to move and have not ended.
    pub(crate) fn moving(&self) -> usize {
        self.ask(b"fake_moving")
    }

    /// Number of ranks that have finalized MPI.
    pub(crate) fn finalized(&self) -> usize {
        self.ask(b"fake_finalized")
    }

    fn set(&self, function: &[u8], value: c_int) {
        type Set = unsafe extern "C" fn(*mut c_void, c_int);
        // SAFETY: this is the type of the functions that `set` is called with; the universe is never freed.
        unsafe { self.library.get::<Set>(function).unwrap()(self.universe, value) }
    }

    fn ask(&self, function: &[u8]) -> usize {
        type Ask = unsafe extern "C" fn(*mut c_void) -> c_int;
        // SAFETY: as for `set`.
        unsafe { self.library.get::<Ask>(function).unwrap()(self.universe) as usize }
    }
}

fn compiled(family: Family) -> PathBuf {
    let (name, define) = match family {
        Family::OpenMpi => ("libmpi.so.40", "FAMILY_OPEN_MPI"),
        Family::Mpich => ("libmpi.so.12", "FAMILY_MPICH"),
        Family::Standard => ("libmpi_abi.so.1", "FAMILY_STANDARD"),
    };
    build(name, &[define])
}

/// Compiles the fake MPI with these definitions, once per process, and returns its path.
pub(crate) fn build(name: &str, defines: &[&str]) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let key = format!("{name} {defines:?}");
    let count = built.len();
    let compile = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("fake-mpi-{}", std::process::id()))
            .join(count.to_string());
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join(name);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_mpi/fake_mpi.c");
        let mut command = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        command.args([
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
            "-Wl,-Bsymbolic",
        ]);
        command.args(defines.iter().map(|define| format!("-D{define}"))).arg("-o").arg(&file).arg(source);
        let output = command.output().expect("a C compiler is there, because Rust links with it");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        file
    };
    built.entry(key).or_insert_with(compile).clone()
}
