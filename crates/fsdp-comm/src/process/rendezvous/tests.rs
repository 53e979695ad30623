use std::collections::BTreeMap;
use std::io::Read;
use std::net::Ipv4Addr;

use super::*;

const ONE_NODE: ProcessPlace = ProcessPlace {
    launched_by: LaunchedBy::Torchrun,
    process: 1,
    processes: 4,
    local_process: 1,
    local_processes: 4,
};

fn several_nodes(launched_by: LaunchedBy) -> ProcessPlace {
    ProcessPlace { launched_by, local_processes: 2, ..ONE_NODE }
}

fn of(
    place: ProcessPlace,
    variables: &[(&str, &str)],
    shared: Option<&Path>,
) -> Result<Rendezvous, RendezvousError> {
    Rendezvous::of(&place, &|name| lookup(variables, name), shared, 77)
}

fn lookup(variables: &[(&str, &str)], name: &str) -> Option<String> {
    variables.iter().find(|(variable, _)| *variable == name).map(|(_, value)| (*value).to_owned())
}

const MASTER: [(&str, &str); 3] =
    [("MASTER_ADDR", "n1"), ("MASTER_PORT", "29500"), ("TORCHELASTIC_USE_AGENT_STORE", "True")];

#[test]
fn launcher_and_variables_select_rendezvous_method() {
    let shared = Some(Path::new("out"));
    let torchrun = several_nodes(LaunchedBy::Torchrun);
    let store = Method::Store { host: "n1".to_owned(), port: 29500 };
    assert_eq!(
        of(torchrun, &MASTER, shared).unwrap(),
        Rendezvous { method: store, folder: "out".into(), is_private: false }
    );
    let port = |host: &str, port| Method::Port { host: host.to_owned(), port };
    assert_eq!(of(torchrun, &MASTER[..2], shared).unwrap().method, port("n1", 29500));
    let named = [&MASTER[..], &[("FSDP_RENDEZVOUS", "[::1]:7")]].concat();
    assert_eq!(of(torchrun, &named, shared).unwrap().method, port("::1", 7));
    assert_eq!(of(ONE_NODE, &named, shared).unwrap().method, port("::1", 7));
    assert_eq!(of(several_nodes(LaunchedBy::OpenMpi), &[], shared).unwrap().method, Method::File);
    let nowhere = of(several_nodes(LaunchedBy::Hydra), &[], None).unwrap_err();
    assert!(matches!(nowhere, RendezvousError::Nowhere { launched_by: LaunchedBy::Hydra }), "{nowhere}");
    for wrong in ["n1", "n1:port", ":7"] {
        let error = of(ONE_NODE, &[("FSDP_RENDEZVOUS", wrong)], None).unwrap_err();
        assert!(error.to_string().contains(wrong), "{error}");
    }
}

#[test]
fn each_launch_gets_its_own_private_folder() {
    let folder = |variables: &[(&str, &str)], parent| {
        Rendezvous::of(&ONE_NODE, &|name| lookup(variables, name), None, parent).unwrap().folder
    };
    assert_eq!(folder(&MASTER, 1), folder(&MASTER, 2), "a shell between torchrun and the process");
    let other = [("MASTER_ADDR", "n1"), ("MASTER_PORT", "29501")];
    assert_ne!(folder(&MASTER, 1), folder(&other, 1));
    assert_ne!(folder(&[], 1), folder(&[], 2));
}

#[test]
fn published_address_and_token_are_removed_with_leader() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("here");
    let meet = of(ONE_NODE, &[("FSDP_RENDEZVOUS_DIR", folder.to_str().unwrap())], None).unwrap();
    assert_eq!(meet.find().unwrap(), []);
    assert!(meet.token(false).unwrap().is_none());
    let listener = meet.bind(Ipv4Addr::LOCALHOST.into()).unwrap();
    let addresses = [listener.local_addr().unwrap(), "[::1]:9".parse().unwrap()];
    let published = meet.publish(&addresses).unwrap();
    assert_eq!(meet.find().unwrap(), addresses);
    let token = meet.token(true).unwrap().unwrap();
    assert_eq!(meet.token(false).unwrap().unwrap().to_hex(), token.to_hex());
    assert_eq!(meet.token(true).unwrap().unwrap().to_hex(), token.to_hex(), "it stays");
    // A later leader has overwritten the file, so this one must not remove it.
    let later = meet.publish(&addresses[..1]).unwrap();
    drop(published);
    assert_eq!(meet.find().unwrap(), addresses[..1]);
    drop(later);
    assert!(!folder.exists(), "it is there for nothing else");
}

#[test]
fn private_folder_readable_by_others_is_rejected() {
    let meet = of(ONE_NODE, &[("MASTER_ADDR", "x"), ("MASTER_PORT", &std::process::id().to_string())], None)
        .unwrap();
    fs::create_dir(&meet.folder).unwrap();
    fs::set_permissions(&meet.folder, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let error = meet.publish(&[]).unwrap_err();
    fs::remove_dir(&meet.folder).unwrap();
    assert!(matches!(error, RendezvousError::NotPrivate { .. }), "{error}");
}

/// A store that answers like PyTorch's, one client after the other.
fn store(listener: &TcpListener) {
    let mut values = BTreeMap::new();
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut read = |len: usize| {
            let mut bytes = vec![0; len];
            stream.read_exact(&mut bytes).map(|()| bytes)
        };
        assert_eq!(read(6).unwrap(), [0x00, 0xce, 0xf7, 0x85, 0x3c, 0x0d]);
        let nonce = read(4).unwrap();
        stream.write_all(&nonce).unwrap();
        loop {
            let mut query = [0];
            if stream.read_exact(&mut query).is_err() {
                break;
            }
            let mut text = || {
                let mut len = [0; 8];
                stream.read_exact(&mut len).unwrap();
                let mut bytes = vec![0; u64::from_le_bytes(len) as usize];
                stream.read_exact(&mut bytes).unwrap();
                bytes
            };
            let key = text();
            match query[0] {
                1 => drop(values.insert(key, text())),
                3 => {
                    let value: Vec<u8> = values.get(&key).cloned().unwrap_or_default();
                    stream.write_all(&(value.len() as u64).to_le_bytes()).unwrap();
                    stream.write_all(&value).unwrap();
                }
                other => panic!("query {other}"),
            }
        }
    }
}

#[test]
fn torchrun_store_returns_latest_published_leader() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || store(&listener));
    let method = Method::Store { host: "127.0.0.1".to_owned(), port };
    let meet = Rendezvous { method, folder: PathBuf::new(), is_private: false };
    assert_eq!(meet.find().unwrap(), []);
    for last in [1, 2] {
        let address = SocketAddr::from((Ipv4Addr::new(10, 0, 0, last), 5));
        meet.publish(&[address]).unwrap();
        assert_eq!(meet.find().unwrap(), [address]);
    }
}

/// The error of a store that accepts a connection, and then does this with it.
fn store_error(accepts: impl FnOnce(TcpListener) + Send + 'static) -> (String, FailureKind) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let thread = std::thread::spawn(move || accepts(listener));
    let method = Method::Store { host: "127.0.0.1".to_owned(), port };
    let meet = Rendezvous { method, folder: PathBuf::new(), is_private: false };
    let error = meet.find().unwrap_err();
    thread.join().unwrap();
    let text = error.to_string();
    let expected = format!(
        "cannot reach torchrun's store (MASTER_ADDR, MASTER_PORT) at 127.0.0.1:{port}, through which processes find \
         each other: "
    );
    (text.strip_prefix(&expected).unwrap_or_else(|| panic!("{text}")).to_owned(), error.kind())
}

#[test]
fn unresponsive_store_error_names_time_limit() {
    let (send, silent) = std::sync::mpsc::channel();
    let (text, kind) = store_error(move |listener| send.send(listener).unwrap());
    assert_eq!((&*text, kind), ("it has not answered within 1 s", FailureKind::Temporary));
    drop(silent);
    let (text, kind) = store_error(|listener| drop(listener.accept().unwrap()));
    assert!(
        ["it has closed the connection", "Connection reset by peer (os error 104)"].contains(&&*text),
        "{text}"
    );
    assert_eq!(kind, FailureKind::Temporary);
}
