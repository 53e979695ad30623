use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Instant;

use super::*;
use crate::auth::{Side, Token, authenticate_within};

/// Connections of strangers, each opened again as soon as it is closed.
fn besiege(address: SocketAddr, strangers: usize, is_over: &AtomicBool) {
    let connect = || {
        let stream = TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok()?;
        stream.set_nonblocking(true).ok()?;
        Some(stream)
    };
    let is_open = |stream: &mut TcpStream| matches!(stream.read(&mut [0; 100]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
    let mut streams: Vec<Option<TcpStream>> = (0..strangers).map(|_| connect()).collect();
    while !is_over.load(Ordering::Relaxed) {
        for stream in &mut streams {
            if !stream.as_mut().is_some_and(is_open) {
                *stream = connect();
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn idle_strangers_do_not_keep_members_out() {
    const MEMBERS: usize = 4;
    // More than the gate has places, so that members have to wait for theirs.
    const STRANGERS: usize = AUTHENTICATING_MAX + 150;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let token = Token::generate().unwrap();
    let (admitted, arrivals) = mpsc::channel();
    let (needed, of_gate) = (Arc::new(()), token.clone());
    let weak = Arc::downgrade(&needed);
    Gate::new(listener, Duration::from_secs(2))
        .unwrap()
        .open(
            "gate",
            move || weak.strong_count() > 0,
            move |stream, limit| {
                if authenticate_within(&stream, limit, &of_gate, Side::Answerer, b"test").is_ok() {
                    admitted.send(stream).unwrap();
                }
            },
        )
        .unwrap();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| besiege(address, STRANGERS, &is_over));
        thread::sleep(Duration::from_millis(300));
        for _ in 0..MEMBERS {
            scope.spawn(|| {
                let end = Instant::now() + Duration::from_secs(30);
                let mut is_in = false;
                while !is_in && Instant::now() < end {
                    is_in = TcpStream::connect(address).is_ok_and(|stream| {
                        authenticate_within(&stream, Duration::from_secs(5), &token, Side::Caller, b"test")
                            .is_ok()
                    });
                }
                assert!(is_in, "strangers hold all places");
            });
        }
        let all: Vec<_> =
            (0..MEMBERS).map_while(|_| arrivals.recv_timeout(Duration::from_secs(30)).ok()).collect();
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(all.len(), MEMBERS);
    });
    // The gate closes when it is no longer needed.
    drop(needed);
    let end = Instant::now() + Duration::from_secs(30);
    while TcpStream::connect(address).is_ok() {
        assert!(Instant::now() < end, "the port is still open");
        thread::sleep(POLL_INTERVAL);
    }
}
