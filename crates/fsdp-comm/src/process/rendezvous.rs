//! How the processes of a world find the process of rank 0, and obtain the token for authentication.
//!
//! On one node, they meet in a directory among the machine's temporary files that only this user can read, named after
//! something that the launcher's processes have in common. On several nodes, the first of these applies:
//! `FSDP_RENDEZVOUS` (`host:port`), torchrun's store, a port on the first host of the Slurm step, the folder shared by
//! all nodes (the output folder of the run). The shared folder also holds the token.
//!
//! A published address may belong to a dead process, so a process that cannot connect looks it up again.

pub mod abandoned;
mod node;
mod slurm;
mod tcp_store;

use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use fsdp_core::FailureKind;
use sha2::{Digest, Sha256};

use super::place::{LaunchedBy, ProcessPlace};
use crate::auth::{Token, TokenError};
use abandoned::{Held, NODE_DIGITS, NODE_PREFIX};
pub use node::NodeFolder;
use tcp_store::TcpStore;

/// The name of torchrun's store in errors.
const STORE: &str = "torchrun's store (MASTER_ADDR, MASTER_PORT)";

/// The key of the leader's addresses in torchrun's store.
const STORE_KEY: &str = "/fsdp/leader";

/// The file with the leader's addresses, in a folder that all processes see.
pub const LEADER_FILE: &str = ".leader";

/// The file with the token, in the same folder.
pub const TOKEN_FILE: &str = ".token";

/// The way in which processes find the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    method: Method,
    /// Where the token is, unless a variable names one; empty if there is no folder.
    folder: PathBuf,
    /// Whether the folder exists only for this purpose and must not be readable by others.
    is_private: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Method {
    /// The leader listens on an agreed port.
    Port { host: String, port: u16 },
    /// The leader publishes its address in torchrun's store.
    Store { host: String, port: u16 },
    /// The leader publishes its address in a file of the folder.
    File,
}

/// Why processes cannot find each other.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// An environment variable has an invalid value.
    #[error("{variable} is `{value}`, expected {expected}")]
    Variable {
        /// Its name.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The expected form.
        expected: &'static str,
    },
    /// Processes on several nodes have no common folder or address.
    #[error(
        "the processes that {launched_by} started on several nodes have no meeting point: set FSDP_RENDEZVOUS \
         (host:port of the node of process 0) and FSDP_TOKEN_FILE"
    )]
    Nowhere {
        /// The launcher.
        launched_by: LaunchedBy,
    },
    /// A folder or file used for the rendezvous is not accessible.
    #[error("cannot {action} {}, through which processes find each other: {source}", path.display())]
    Io {
        /// The attempted operation.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// A folder with a predictable name belongs to another user or is accessible to others.
    #[error("{} belongs to another user or can be read by others; remove it", path.display())]
    NotPrivate {
        /// The folder.
        path: PathBuf,
    },
    /// The port or store cannot be reached.
    #[error("cannot reach {what} at {host}:{port}, through which processes find each other: {source}")]
    Network {
        /// The service there.
        what: &'static str,
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// Why it failed.
        source: io::Error,
    },
    /// The token is invalid or cannot be read.
    #[error(transparent)]
    Token(#[from] TokenError),
}

impl RendezvousError {
    /// The kind of this failure.
    pub fn kind(&self) -> FailureKind {
        match self {
            RendezvousError::Variable { .. }
            | RendezvousError::Nowhere { .. }
            | RendezvousError::NotPrivate { .. } => FailureKind::Input,
            RendezvousError::Io { source, .. } => FailureKind::of_io(source),
            RendezvousError::Network { .. } => FailureKind::Temporary,
            RendezvousError::Token(error) => error.kind(),
        }
    }
}

impl Rendezvous {
    /// Selects the rendezvous of a world. `variable` looks up an environment variable; `shared` is a folder that all
    /// nodes see, if any; `launcher` is the [process](super::ancestor) that has started them on this node.
    ///
    /// # Errors
    /// [`RendezvousError::Variable`], [`RendezvousError::Nowhere`].
    pub fn of(
        place: &ProcessPlace,
        variable: &dyn Fn(&str) -> Option<String>,
        shared: Option<&Path>,
        launcher: u32,
    ) -> Result<Self, RendezvousError> {
        if let Some(folder) = variable("FSDP_RENDEZVOUS_DIR") {
            return Ok(Self { method: Method::File, folder: folder.into(), is_private: true });
        }
        let named = variable("FSDP_RENDEZVOUS").map(|value| endpoint(&value)).transpose()?;
        if place.is_one_node() && named.is_none() {
            let folder = std::env::temp_dir().join(common_name(place.launched_by, variable, launcher));
            return Ok(Self { method: Method::File, folder, is_private: true });
        }
        let method = match (named, place.launched_by) {
            (Some((host, port)), _) => Some(Method::Port { host, port }),
            (None, LaunchedBy::Torchrun) => torchrun(variable)?,
            (None, LaunchedBy::Srun) => {
                slurm::first_host(variable).map(|(host, port)| Method::Port { host, port })
            }
            (None, _) => None,
        };
        if method.is_none() && shared.is_none() {
            return Err(RendezvousError::Nowhere { launched_by: place.launched_by });
        }
        let (method, folder) = (method.unwrap_or(Method::File), shared.map(Path::to_owned));
        Ok(Self { method, folder: folder.unwrap_or_default(), is_private: false })
    }

    /// On the leader: creates and locks the private folder among the temporary files, before anything is put into it,
    /// and removes folders that killed processes have left behind. `None` if the folder is not private.
    ///
    /// # Errors
    /// [`RendezvousError::Io`], [`RendezvousError::NotPrivate`].
    pub fn take(&self) -> Result<Option<Held>, RendezvousError> {
        if !self.is_private {
            return Ok(None);
        }
        self.folder.parent().iter().for_each(|temporary| abandoned::remove_abandoned(temporary));
        self.make_folder()?;
        Ok(Some(abandoned::hold(&self.folder)))
    }

    /// Returns the token in the common folder, where the leader creates a missing one. `None` if there is no such folder,
    /// or no token in it yet.
    ///
    /// # Errors
    /// [`RendezvousError::Token`], [`RendezvousError::Io`], [`RendezvousError::NotPrivate`].
    pub fn token(&self, is_leader: bool) -> Result<Option<Token>, RendezvousError> {
        if !self.has_folder() {
            return Ok(None);
        }
        let path = self.folder.join(TOKEN_FILE);
        if is_leader {
            self.make_folder()?;
            if !path.exists() {
                create_once(&path, Token::generate()?.to_hex().as_bytes())
                    .map_err(io_failed("write", &path))?;
            }
        }
        if path.exists() { Ok(Some(Token::from_file(&path)?)) } else { Ok(None) }
    }

    /// Whether there is a folder in which the leader can store a token.
    pub fn has_folder(&self) -> bool {
        !self.folder.as_os_str().is_empty()
    }

    /// Whether the leader listens on a port agreed in advance; then any of its addresses may be used.
    pub fn is_at_port(&self) -> bool {
        matches!(self.method, Method::Port { .. })
    }

    /// Binds the leader's listener: to the agreed port, or to a port of `address` that the system chooses.
    ///
    /// # Errors
    /// [`RendezvousError::Network`].
    pub fn bind(&self, address: IpAddr) -> Result<TcpListener, RendezvousError> {
        let (host, port) = match &self.method {
            Method::Port { host, port } => (host.clone(), *port),
            Method::Store { .. } | Method::File => (address.to_string(), 0),
        };
        TcpListener::bind((address, port)).map_err(network_failed("a port for the leader", &host, port))
    }

    /// Publishes the leader's addresses. Dropping the result removes the file, if there is one.
    ///
    /// # Errors
    /// [`RendezvousError::Network`], [`RendezvousError::Io`].
    pub fn publish(&self, addresses: &[SocketAddr]) -> Result<Published, RendezvousError> {
        let text: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        let text = text.join("\n");
        match &self.method {
            Method::Port { .. } => Ok(Published { file: None, is_private: false }),
            Method::Store { host, port } => {
                let set = |store: &mut TcpStore| store.set(STORE_KEY, text.as_bytes());
                TcpStore::query((host, *port), set).map_err(network_failed(STORE, host, *port))?;
                Ok(Published { file: None, is_private: false })
            }
            Method::File => {
                self.make_folder()?;
                let path = self.folder.join(LEADER_FILE);
                write_private(&path, text.as_bytes())?;
                Ok(Published { file: Some((path, text)), is_private: self.is_private })
            }
        }
    }

    /// Returns the leader's published addresses; empty if there are none yet.
    ///
    /// # Errors
    /// [`RendezvousError::Network`], [`RendezvousError::Io`], [`RendezvousError::NotPrivate`].
    pub fn find(&self) -> Result<Vec<SocketAddr>, RendezvousError> {
        let text = match &self.method {
            Method::Port { host, port } => {
                let found = (host.as_str(), *port).to_socket_addrs();
                return Ok(found.map_err(network_failed("the leader", host, *port))?.collect());
            }
            Method::Store { host, port } => {
                let get = |store: &mut TcpStore| store.get(STORE_KEY);
                let found =
                    TcpStore::query((host, *port), get).map_err(network_failed(STORE, host, *port))?;
                String::from_utf8(found.unwrap_or_default()).unwrap_or_default()
            }
            Method::File => {
                let path = self.folder.join(LEADER_FILE);
                match fs::read_to_string(&path) {
                    Ok(text) => {
                        self.check_private()?;
                        text
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
                    Err(source) => return Err(io_failed("read", &path)(source)),
                }
            }
        };
        // Lines that are not addresses were written by another program; the leader will overwrite them.
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// Creates the folder, with mode 700 if it is private; an output folder may already exist.
    fn make_folder(&self) -> Result<(), RendezvousError> {
        let mut builder = DirBuilder::new();
        if self.is_private {
            builder.mode(0o700);
        }
        builder.recursive(true).create(&self.folder).map_err(io_failed("create", &self.folder))?;
        self.check_private()
    }

    /// Fails if a folder that must be private belongs to another user or is accessible to others: anyone could have
    /// created that name among the temporary files.
    fn check_private(&self) -> Result<(), RendezvousError> {
        if !self.is_private {
            return Ok(());
        }
        let found = fs::symlink_metadata(&self.folder).map_err(io_failed("inspect", &self.folder))?;
        let is_own = found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
        if is_own && found.mode() & 0o077 == 0 {
            Ok(())
        } else {
            Err(RendezvousError::NotPrivate { path: self.folder.clone() })
        }
    }
}

impl fmt::Display for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.method {
            Method::Port { host, port } => write!(f, "{host}:{port}"),
            Method::Store { host, port } => write!(f, "torchrun's store at {host}:{port}"),
            Method::File => write!(f, "a file in {}", self.folder.display()),
        }
    }
}

/// The leader's published addresses. Dropping it removes the file, if there is one.
#[derive(Debug)]
pub struct Published {
    file: Option<(PathBuf, String)>,
    is_private: bool,
}

impl Drop for Published {
    fn drop(&mut self) {
        if let Some((path, text)) = &self.file
            && fs::read_to_string(path).is_ok_and(|found| found == *text)
        {
            // A later leader overwrites a file that could not be removed.
            let _ = fs::remove_file(path);
            let folder = path.parent().filter(|_| self.is_private);
            let _ = folder
                .map(|folder| fs::remove_file(folder.join(TOKEN_FILE)).and_then(|()| fs::remove_dir(folder)));
        }
    }
}

/// Parses `host:port`; an IPv6 address is in brackets.
fn endpoint(value: &str) -> Result<(String, u16), RendezvousError> {
    let invalid = || RendezvousError::Variable {
        variable: "FSDP_RENDEZVOUS",
        value: value.to_owned(),
        expected: "host:port of the node of process 0",
    };
    let (host, port) = value.rsplit_once(':').ok_or_else(invalid)?;
    let port = port.parse().map_err(|_| invalid())?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() { Err(invalid()) } else { Ok((host.to_owned(), port)) }
}

/// Torchrun's agents run a store at the master's port, or leave the port to the processes.
fn torchrun(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Method>, RendezvousError> {
    let (Some(host), Some(port)) = (variable("MASTER_ADDR"), variable("MASTER_PORT")) else {
        return Ok(None);
    };
    let invalid = |_| RendezvousError::Variable {
        variable: "MASTER_PORT",
        value: port.clone(),
        expected: "a port number",
    };
    let port = port.trim().parse().map_err(invalid)?;
    let has_store = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    Ok(Some(if has_store { Method::Store { host, port } } else { Method::Port { host, port } }))
}

/// A name common to the processes of one launch on one node, and to no others.
fn common_name(launched_by: LaunchedBy, variable: &dyn Fn(&str) -> Option<String>, launcher: u32) -> String {
    let names: &[&str] = match launched_by {
        LaunchedBy::Torchrun => &["MASTER_ADDR", "MASTER_PORT"],
        LaunchedBy::OpenMpi => &["PMIX_NAMESPACE"],
        LaunchedBy::Srun => &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        LaunchedBy::Fsdp | LaunchedBy::Hydra | LaunchedBy::Mvapich => &[],
    };
    let values: Option<Vec<String>> = names.iter().map(|name| variable(name)).collect();
    let common = match values.filter(|values| !values.is_empty()) {
        Some(values) => values.join("\n"),
        None => launcher.to_string(),
    };
    let text = format!("{launched_by}\n{common}\n{}", rustix::process::geteuid().as_raw());
    let digest: String =
        Sha256::digest(text).iter().take(NODE_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect();
    format!("{NODE_PREFIX}{digest}")
}

/// Creates a file that only this user can read, unless it exists. If several do so at once, one wins.
fn create_once(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut temporary = tempfile::NamedTempFile::new_in(folder)?;
    temporary.write_all(content)?;
    temporary.as_file().sync_all()?;
    let created = fs::hard_link(temporary.path(), path).or_else(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => Err(error),
        // Some file systems have no hard links. There the file is briefly visible before it has its content.
        _ => {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            file.write_all(content).and_then(|()| file.sync_all())
        }
    });
    created.or_else(|error| if error.kind() == io::ErrorKind::AlreadyExists { Ok(()) } else { Err(error) })
}

/// Replaces the content of a file that only this user can read, atomically.
fn write_private(path: &Path, content: &[u8]) -> Result<(), RendezvousError> {
    let write = || {
        let mut file = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
        file.write_all(content)?;
        file.as_file().sync_all()?;
        file.persist(path).map(drop).map_err(io::Error::from)
    };
    write().map_err(io_failed("write", path))
}

fn io_failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RendezvousError {
    let path = path.to_owned();
    move |source| RendezvousError::Io { action, path, source }
}

fn network_failed(what: &'static str, host: &str, port: u16) -> impl FnOnce(io::Error) -> RendezvousError {
    let host = host.to_owned();
    move |source| RendezvousError::Network { what, host, port, source }
}

#[cfg(test)]
mod tests;
