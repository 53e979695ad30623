use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use super::*;

fn token(byte: u8) -> Token {
    Token::from_hex(&format!("{byte:02x}").repeat(32)).unwrap()
}

/// The results of caller and answerer.
fn authenticate_pair(
    caller: (&Token, &[u8]),
    answerer: (&Token, &[u8]),
) -> (Result<(), AuthError>, Result<(), AuthError>) {
    let (mut left, mut right) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let called = scope.spawn(move || authenticate(&mut left, caller.0, Side::Caller, caller.1));
        let answered = authenticate(&mut right, answerer.0, Side::Answerer, answerer.1);
        (called.join().unwrap(), answered)
    })
}

#[test]
fn same_token_and_purpose_authenticate_both_ends() {
    let token = Token::generate().unwrap();
    let copy = Token::from_hex(&token.to_hex()).unwrap();
    let (called, answered) = authenticate_pair((&token, b"control"), (&copy, b"control"));
    called.unwrap();
    answered.unwrap();
}

#[test]
fn wrong_token_or_purpose_is_rejected_by_both_ends() {
    for (caller, answerer) in [
        ((token(1), "control"), (token(2), "control")),
        ((token(1), "control"), (token(1), "data")),
        ((token(1), "control"), (token(1), "control 2")),
    ] {
        let (called, answered) =
            authenticate_pair((&caller.0, caller.1.as_bytes()), (&answerer.0, answerer.1.as_bytes()));
        assert!(matches!(called, Err(AuthError::Token)), "{called:?}");
        assert!(matches!(answered, Err(AuthError::Token)), "{answered:?}");
    }
}

/// Runs one end against a peer that sends `bytes`; returns the result of the end, and every byte that it sent.
fn authenticate_against(bytes: &[u8], side: Side) -> (Result<(), AuthError>, Vec<u8>) {
    let (mut end, mut attacker) = UnixStream::pair().unwrap();
    attacker.write_all(bytes).unwrap();
    attacker.shutdown(std::net::Shutdown::Write).unwrap();
    let result = authenticate(&mut end, &token(1), side, b"control");
    drop(end);
    let mut received = Vec::new();
    let _reset_when_bytes_were_left = attacker.read_to_end(&mut received);
    (result, received)
}

#[test]
fn reflected_proof_is_rejected() {
    let (mut end, mut attacker) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let answered = scope.spawn(move || authenticate(&mut end, &token(1), Side::Answerer, b"control"));
        attacker.write_all(&VERSION).unwrap();
        attacker.write_all(&[7; NONCE_LEN]).unwrap();
        let mut received = [0; 8 + NONCE_LEN + MAC_LEN];
        attacker.read_exact(&mut received).unwrap();
        attacker.write_all(&received[8 + NONCE_LEN..]).unwrap();
        assert!(matches!(answered.join().unwrap(), Err(AuthError::Token)));
    });
}

#[test]
fn caller_rejects_its_own_echoed_hello() {
    let (mut end, mut attacker) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        let called = scope.spawn(move || authenticate(&mut end, &token(1), Side::Caller, b"control"));
        let mut hello = [0; 8 + NONCE_LEN];
        attacker.read_exact(&mut hello).unwrap();
        attacker.write_all(&hello).unwrap();
        attacker.write_all(&[0; MAC_LEN]).unwrap();
        assert!(matches!(called.join().unwrap(), Err(AuthError::Token)));
    });
}

#[test]
fn unauthenticated_peer_receives_only_nonce_and_proof() {
    let (result, received) = authenticate_against(b"GET / HTTP/1.1\r\n\r\n", Side::Answerer);
    assert!(matches!(result, Err(AuthError::Version { got }) if &got == b"GET / HT"), "{result:?}");
    assert_eq!(received, b"", "a stranger gets no answer");
    let hello = [VERSION.as_slice(), &[0; NONCE_LEN]].concat();
    for len in 0..hello.len() {
        let (result, received) = authenticate_against(&hello[..len], Side::Answerer);
        assert!(matches!(result, Err(AuthError::Connection(_))), "{result:?}");
        assert_eq!(received, b"");
    }
    let (result, received) = authenticate_against(&hello, Side::Answerer);
    assert!(matches!(result, Err(AuthError::Connection(_))), "{result:?}");
    assert_eq!(received.len(), 8 + NONCE_LEN + MAC_LEN);
}

#[test]
fn slow_peer_is_bound_by_total_timeout() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, _) = listener.accept().unwrap();
    thread::scope(|scope| {
        let limit = Duration::from_secs(1);
        let answered =
            scope.spawn(move || authenticate_within(&stream, limit, &token(1), Side::Answerer, b"control"));
        // One byte at a time, each within the limit; the other end hangs up long before the last one.
        let sent = VERSION.iter().cycle().take_while(|byte| {
            thread::park_timeout(Duration::from_millis(250));
            slow.write_all(&[**byte]).is_ok()
        });
        assert!(sent.take(8 + NONCE_LEN).count() < 8 + NONCE_LEN);
        let error = answered.join().unwrap().unwrap_err();
        assert!(matches!(&error, AuthError::Connection(e) if e.kind() == io::ErrorKind::TimedOut), "{error}");
    });
}

#[test]
fn token_file_accessible_to_others_is_rejected() {
    let folder = std::env::temp_dir().join(format!("fsdp-token-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join("token");
    fs::write(&path, format!("{}\n", token(3).to_hex())).unwrap();
    for (mode, is_read) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        match Token::from_file(&path) {
            Ok(read) => assert!(is_read && read.to_hex() == token(3).to_hex()),
            Err(error) => {
                assert!(!is_read && error.to_string().contains(&format!("mode {mode:o}")), "{error}")
            }
        }
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&path, "secret").unwrap();
    let error = Token::from_file(&path).unwrap_err().to_string();
    assert!(error.contains("has 6 characters") && !error.contains("secret"), "{error}");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn token_is_redacted_in_debug_and_errors() {
    assert_eq!(format!("{:?}", token(3)), "Token(..)");
    let error = Token::from_hex("zz").unwrap_err().to_string();
    assert!(!error.contains("zz"), "{error}");
}
