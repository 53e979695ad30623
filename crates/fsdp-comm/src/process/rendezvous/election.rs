//! Which of several equal programs leads, where they have a folder in common and none is named.
//!
//! Who leads has made the file with the highest number, by a hard link, which of several that try only one can. When it does
//! not answer, the next number is anybody's to take. So a folder is enough, and neither locks nor clocks are asked, which
//! network file systems have of many kinds.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{RendezvousError, io_failed};
use crate::process::interface;

/// How long an address may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

const PREFIX: &str = "leader-";

/// What a program is after an election.
#[derive(Debug)]
pub enum Elected {
    /// It leads: others come to this port, as long as the second value lives.
    Leader(TcpListener, Lead),
    /// It follows who answers at the other end.
    Follower(TcpStream),
}

/// The files by which a leader is found. Dropping it removes them.
#[derive(Debug)]
pub struct Lead {
    folder: PathBuf,
    number: u64,
}

/// Finds the leader of a folder, or takes its place if there is none that answers and that `is_one`: a port may be
/// another program's by now. A leader listens at `address`.
///
/// # Errors
/// [`RendezvousError::Io`], [`RendezvousError::Network`].
pub fn elect(
    folder: &Path,
    address: IpAddr,
    is_one: &dyn Fn(&TcpStream) -> bool,
) -> Result<Elected, RendezvousError> {
    fs::create_dir_all(folder).map_err(io_failed("create", folder))?;
    loop {
        let newest = newest(folder)?;
        if let Some(number) = newest
            && let Some(stream) = reach(&file(folder, number), is_one)?
        {
            return Ok(Elected::Follower(stream));
        }
        let number = newest.unwrap_or(0) + 1;
        if let Some(leader) = take(folder, number, address)? {
            return Ok(leader);
        }
    }
}

/// The highest number that was taken.
fn newest(folder: &Path) -> Result<Option<u64>, RendezvousError> {
    let failed = io_failed("list", folder);
    let names = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(failed)?;
    let number = |entry: &fs::DirEntry| entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse().ok();
    Ok(names.iter().filter_map(number).max())
}

/// A connection with who has made a file.
fn reach(file: &Path, is_one: &dyn Fn(&TcpStream) -> bool) -> Result<Option<TcpStream>, RendezvousError> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        // It leads no longer.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(io_failed("read", file)(source)),
    };
    let addresses = text.lines().filter_map(|line| line.parse::<SocketAddr>().ok());
    let connect = |address| TcpStream::connect_timeout(&address, ANSWER_WITHIN).ok();
    Ok(addresses.filter_map(connect).find(|stream| is_one(stream)))
}

/// Takes a number; none if somebody else has.
fn take(folder: &Path, number: u64, address: IpAddr) -> Result<Option<Elected>, RendezvousError> {
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
    let publish = || {
        let mut content = tempfile::NamedTempFile::new_in(folder)?;
        io::Write::write_all(&mut content, text.join("\n").as_bytes())?;
        content.as_file().sync_all()?;
        fs::hard_link(content.path(), &path)
    };
    match publish() {
        Ok(()) => Ok(Some(Elected::Leader(listener, Lead { folder: folder.to_owned(), number }))),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(source) => Err(io_failed("write", &path)(source)),
    }
}

fn file(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number}"))
}

impl Lead {
    /// Whether somebody has taken the next number: who did not answer for a while may be led by another one.
    pub fn is_superseded(&self) -> bool {
        newest(&self.folder).is_ok_and(|newest| newest > Some(self.number))
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // Its own file goes last: as long as it is there, nobody takes a number that was taken before.
        for number in 1..=self.number {
            let _ = fs::remove_file(file(&self.folder, number));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::thread;

    use super::*;

    fn join(folder: &Path) -> Elected {
        elect(folder, Ipv4Addr::LOCALHOST.into(), &|_| true).unwrap()
    }

    #[test]
    fn of_many_that_come_at_once_one_leads() {
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
    fn the_place_of_a_leader_that_is_gone_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let Elected::Leader(listener, lead) = join(folder.path()) else { panic!("nobody else is there") };
        let Elected::Follower(stream) = join(folder.path()) else { panic!("there is a leader") };
        assert_eq!(stream.peer_addr().unwrap(), listener.local_addr().unwrap());
        // As a process that is killed: its file stays.
        std::mem::forget(lead);
        drop(listener);
        let Elected::Leader(listener, lead) = join(folder.path()) else { panic!("the leader is gone") };
        assert!(!lead.is_superseded());
        assert!(folder.path().join("leader-1").exists() && folder.path().join("leader-2").exists());
        // Another program has its port.
        let stranger = elect(folder.path(), Ipv4Addr::LOCALHOST.into(), &|_| false).unwrap();
        assert!(matches!(stranger, Elected::Leader(..)) && lead.is_superseded());
        drop((listener, lead, stranger));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }
}
