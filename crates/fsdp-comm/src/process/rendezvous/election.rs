//! Elects a leader among equal programs that share a folder, where none is designated.
//!
//! The leader is the program that created the file with the highest number, which only one of several can do. If it
//! does not answer, any program may take the next number. A folder suffices: neither locks nor clocks are used, which
//! differ between network file systems.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::{RendezvousError, create_once, io_failed};
use crate::process::interface;

/// Time limit for a connection to one address.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// How often a silent leader is tried again, and the pause between two attempts.
const SILENT_TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(500);

const PREFIX: &str = "leader-";

/// The outcome of an election for this program.
#[derive(Debug)]
pub enum Elected {
    /// It leads: it listens on this port, as long as it keeps the [`Lead`].
    Leader(TcpListener, Lead),
    /// It follows the program at the other end of this connection.
    Follower(TcpStream),
}

/// The election files of a leader. Dropping it removes them.
#[derive(Debug)]
pub struct Lead {
    folder: PathBuf,
    number: u64,
}

/// Finds the leader of a folder, or becomes leader if none answers. `is_leader` checks that a connection leads to a
/// leader: another program may have its port by now. A leader listens at `address`.
///
/// # Errors
/// The errors of `is_leader`; [`RendezvousError::Io`], [`RendezvousError::Network`].
pub fn elect<E: From<RendezvousError>>(
    folder: &Path,
    address: IpAddr,
    is_leader: &dyn Fn(&TcpStream) -> Result<bool, E>,
) -> Result<Elected, E> {
    fs::create_dir_all(folder).map_err(io_failed("create", folder))?;
    // Listings on network file systems may be stale; a number that could not be taken exists.
    let (mut taken, mut tries) = (0, 0);
    loop {
        taken = newest(folder)?.max(taken);
        let reached = if taken > 0 { reach(&file(folder, taken), is_leader)? } else { Reached::Absent };
        match reached {
            Reached::Leader(stream) => return Ok(Elected::Follower(stream)),
            // It may be temporarily overloaded.
            Reached::Silent if tries < SILENT_TRIES => tries += 1,
            Reached::Silent | Reached::Absent => match claim(folder, taken + 1, address)? {
                Some(leader) => return Ok(leader),
                None => (taken, tries) = (taken + 1, 0),
            },
        }
        thread::sleep(PAUSE);
    }
}

/// The result of contacting a leader.
enum Reached {
    Leader(TcpStream),
    /// A connection failed (not merely refused), or the other end did not prove to be a leader.
    Silent,
    Absent,
}

/// The highest number taken, 0 if none.
fn newest(folder: &Path) -> Result<u64, RendezvousError> {
    let failed = io_failed("list", folder);
    let names = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(failed)?;
    let number = |entry: &fs::DirEntry| entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse().ok();
    Ok(names.iter().filter_map(number).max().unwrap_or(0))
}

/// Connects to the program that created a file.
fn reach<E: From<RendezvousError>>(
    file: &Path,
    is_leader: &dyn Fn(&TcpStream) -> Result<bool, E>,
) -> Result<Reached, E> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        // It no longer leads.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Reached::Absent),
        Err(source) => return Err(io_failed("read", file)(source).into()),
    };
    let mut reached = Reached::Absent;
    for address in text.lines().filter_map(|line| line.parse::<SocketAddr>().ok()) {
        match TcpStream::connect_timeout(&address, ANSWER_WITHIN) {
            Ok(stream) if is_leader(&stream)? => return Ok(Reached::Leader(stream)),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Ok(_) | Err(_) => reached = Reached::Silent,
        }
    }
    Ok(reached)
}

/// Takes a number; `None` if another program has taken it.
fn claim(folder: &Path, number: u64, address: IpAddr) -> Result<Option<Elected>, RendezvousError> {
    let failed = |source| RendezvousError::Network {
        what: "a port for the leader",
        host: address.to_string(),
        port: 0,
        source,
    };
    let listener = TcpListener::bind((address, 0)).map_err(failed)?;
    let addresses = listener.local_addr().and_then(interface::reachable).map_err(failed)?;
    let text: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    let path = file(folder, number);
    let is_first = create_once(&path, text.join("\n").as_bytes()).map_err(io_failed("write", &path))?;
    Ok(is_first.then(|| Elected::Leader(listener, Lead { folder: folder.to_owned(), number })))
}

fn file(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number}"))
}

impl Lead {
    /// Whether another program has taken the next number: while this one did not answer, another may have become
    /// leader.
    pub fn is_superseded(&self) -> bool {
        // Checked by name as well, because a listing may be stale. A program that cannot list the folder does not lead.
        let next = file(&self.folder, self.number + 1);
        next.exists() || newest(&self.folder).map_or(true, |newest| newest > self.number)
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // This leader's own file goes last: while it exists, no program takes a number that was taken before.
        for number in 1..=self.number {
            let _ = fs::remove_file(file(&self.folder, number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn join(folder: &Path) -> Elected {
        elect::<RendezvousError>(folder, Ipv4Addr::LOCALHOST.into(), &|_| Ok(true)).unwrap()
    }

    #[test]
    fn concurrent_joins_elect_one_leader() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("deep/launch");
        let elected: Vec<Elected> = thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| join(&folder))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let leaders = elected.iter().filter(|one| matches!(one, Elected::Leader(..))).count();
        assert_eq!(leaders, 1);
    }

    #[test]
    fn dead_leader_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let Elected::Leader(listener, lead) = join(folder.path()) else { panic!("nobody else is there") };
        let Elected::Follower(stream) = join(folder.path()) else { panic!("there is a leader") };
        assert_eq!(stream.peer_addr().unwrap(), listener.local_addr().unwrap());
        // Like a killed process: its file stays.
        std::mem::forget(lead);
        drop(listener);
        let Elected::Leader(listener, lead) = join(folder.path()) else { panic!("the leader is gone") };
        assert!(!lead.is_superseded());
        assert!(folder.path().join("leader-1").exists() && folder.path().join("leader-2").exists());
        // Simulates another program on its port.
        let is_none = |_: &TcpStream| Ok::<_, RendezvousError>(false);
        let stranger = elect(folder.path(), Ipv4Addr::LOCALHOST.into(), &is_none).unwrap();
        assert!(matches!(stranger, Elected::Leader(..)) && lead.is_superseded());
        drop((listener, lead, stranger));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }
}
