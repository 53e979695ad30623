//! Clients that connect to the ports of a run but are not its processes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use fsdp_comm::auth::{Side, Token, authenticate_within};

use crate::kills::ends_as_if_nothing_had_been;
use crate::support::{Ran, Sandbox};
use crate::world::{FSDP, World, free_port, process, wait_until};

/// Returns the addresses on which a process listens, from `/proc`.
fn ports(process: u32) -> Vec<SocketAddr> {
    const LISTENS: &str = "0A";
    let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fd")) else { return Vec::new() };
    let sockets: Vec<String> = files
        .filter_map(|file| Some(std::fs::read_link(file.ok()?.path()).ok()?.to_str()?.to_owned()))
        .collect();
    let table = std::fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
    let port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let is_own = sockets.contains(&format!("socket:[{}]", words[9]));
        let (_, port) = words[1].split_once(':')?;
        (words[3] == LISTENS && is_own)
            .then(|| SocketAddr::from(([127, 0, 0, 1], u16::from_str_radix(port, 16).unwrap())))
    };
    table.lines().skip(1).filter_map(port).collect()
}

/// What clients do with a connection, one after the other.
const DEEDS: [fn(TcpStream) -> bool; 4] = [
    // Sends garbage until the connection is closed or 400 KiB are sent.
    |mut stream| (0..100).all(|_| stream.write_all(&[0x5a; 4096]).is_ok()),
    // Sends nothing.
    |mut stream| stream.read(&mut [0]).is_ok_and(|count| count > 0),
    // Sends 20 bytes, one every 10 ms.
    |mut stream| {
        (0..20).all(|_| {
            std::thread::sleep(Duration::from_millis(10));
            stream.write_all(&[0]).is_ok()
        })
    },
    // Authenticates like a process, with another token.
    |stream| {
        let token = Token::generate().unwrap();
        let limit = Duration::from_millis(500);
        assert!(authenticate_within(&stream, limit, &token, Side::Caller, b"control").is_err());
        false
    },
];

/// Number of connections to exceed before the run may end.
const STRANGERS: usize = 50;

#[test]
fn unauthenticated_clients_do_not_affect_run() {
    let sandbox = Sandbox::new();
    let (is_over, count) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut ran = Vec::new();
    std::thread::scope(|scope| {
        // The run continues until there have been enough connections.
        let world = World::start(&sandbox, FSDP, 2, "train run.toml --set train.steps=1000000");
        for process in [0, 1] {
            let id = world.id(process);
            // The leader has a control port and a data port, another process only a data port.
            wait_until("its ports", || ports(id).len() >= 2 - process);
            for port in ports(id) {
                for deed in DEEDS {
                    let (is_over, count) = (&is_over, &count);
                    scope.spawn(move || {
                        while !is_over.load(Ordering::Relaxed) {
                            let Ok(stream) = TcpStream::connect(port) else { return };
                            stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
                            deed(stream);
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
            }
        }
        wait_until("many strangers", || count.load(Ordering::Relaxed) > STRANGERS);
        world.signal(0, "TERM");
        ran = world.end();
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!([ran[0].code, ran[1].code], [Some(75); 2], "{} {}", ran[0].stderr, ran[1].stderr);
    ends_as_if_nothing_had_been(&sandbox, "train run.toml");
}

#[test]
fn process_joins_leader_whose_port_is_full_of_strangers() {
    const STRANGERS: usize = 400;
    let sandbox = Sandbox::new();
    let port = free_port();
    let start = |number: usize| {
        let mut command = process(&sandbox, FSDP, number, 2);
        command.env("FSDP_LOCAL_PROCESS", "0").env("FSDP_LOCAL_PROCESSES", "1");
        command.env("FSDP_RENDEZVOUS", format!("127.0.0.1:{port}")).env("FSDP_SOCKET_IFNAME", "lo");
        command.args(["train", "run.toml"]).spawn().unwrap()
    };
    let is_over = AtomicBool::new(false);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    std::thread::scope(|scope| {
        let first = start(0);
        wait_until("the port", || TcpStream::connect(address).is_ok());
        for _ in 0..STRANGERS {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let stream = TcpStream::connect_timeout(&address, Duration::from_millis(500));
                    let Ok(mut stream) = stream else {
                        std::thread::sleep(Duration::from_millis(5));
                        continue;
                    };
                    stream.set_read_timeout(Some(Duration::from_secs(6))).unwrap();
                    while stream.read(&mut [0; 100]).is_ok_and(|len| len > 0) {}
                }
            });
        }
        std::thread::sleep(Duration::from_secs(1));
        let second = start(1);
        let ran = [second, first].map(|child| Ran::of(child.wait_with_output().unwrap()));
        is_over.store(true, Ordering::Relaxed);
        assert_eq!([ran[0].code, ran[1].code], [Some(0); 2], "{} {}", ran[0].stderr, ran[1].stderr);
    });
}
