//! Selects the network interface over which others reach this process.
//!
//! The rules are NCCL's: `FSDP_SOCKET_IFNAME`, or else `NCCL_SOCKET_IFNAME`, is a list of name prefixes (`eth,ib`). A
//! leading `=` makes them whole names, a leading `^` excludes them instead. Without either variable, it is the
//! interface that routes to the process of rank 0, or loopback if all processes are on one node.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// An interface that is up, and one of its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name in the operating system.
    pub name: String,
    /// Its address.
    pub address: IpAddr,
}

/// Why the requested interface could not be selected.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// The operating system cannot list the interfaces.
    #[error("cannot list the network interfaces of this machine: {0}")]
    List(#[from] io::Error),
    /// No interface matches.
    #[error("{variable} is `{value}`, which matches none of the network interfaces {}", names(there))]
    NoMatch {
        /// The variable that requested it.
        variable: &'static str,
        /// The value of the variable.
        value: String,
        /// The interfaces of this machine.
        there: Vec<Interface>,
    },
}

/// The variables that request interfaces, in order of precedence.
const VARIABLES: [&str; 2] = ["FSDP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"];

/// Returns all interfaces with an address.
///
/// # Errors
/// The error of the operating system.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let found = if_addrs::get_if_addrs()?;
    Ok(found.into_iter().map(|found| Interface { address: found.ip(), name: found.name }).collect())
}

/// Returns the requested address of this machine; `None` if no variable is set or the first one that is set is empty.
///
/// # Errors
/// [`InterfaceError`].
pub fn asked_for(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<IpAddr>, InterfaceError> {
    find_requested(variable, &interfaces()?)
}

fn find_requested(
    variable: &dyn Fn(&str) -> Option<String>,
    available: &[Interface],
) -> Result<Option<IpAddr>, InterfaceError> {
    let requested = VARIABLES.into_iter().find_map(|name| Some((name, variable(name)?)));
    let Some((variable, value)) = requested.filter(|(_, value)| !value.is_empty()) else { return Ok(None) };
    match available.iter().find(|interface| matches(&value, &interface.name)) {
        Some(found) => Ok(Some(found.address)),
        None => Err(InterfaceError::NoMatch { variable, value, there: available.to_vec() }),
    }
}

/// Whether `name` is selected by `list`, according to NCCL's rules.
fn matches(list: &str, name: &str) -> bool {
    let (excludes, list) = list.strip_prefix('^').map_or((false, list), |list| (true, list));
    let (is_exact, list) = list.strip_prefix('=').map_or((false, list), |list| (true, list));
    let is_listed =
        list.split(',').any(|entry| if is_exact { name == entry } else { name.starts_with(entry) });
    is_listed != excludes
}

/// Returns the address of this machine on the route to `leader`. Sends nothing.
///
/// # Errors
/// The error of the operating system, if there is no route.
pub fn towards(leader: SocketAddr) -> io::Result<IpAddr> {
    let unspecified: IpAddr =
        if leader.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((unspecified, 0))?;
    socket.connect(leader)?;
    Ok(socket.local_addr()?.ip())
}

/// Returns the addresses at which a port of this machine can be reached: if it listens on all interfaces, every address
/// of the machine, loopback last.
///
/// # Errors
/// The errors of [`interfaces`].
pub fn reachable(port: SocketAddr) -> io::Result<Vec<SocketAddr>> {
    if !port.ip().is_unspecified() {
        return Ok(vec![port]);
    }
    let is_outside = |address: &IpAddr| !address.is_loopback() && address.is_ipv4() == port.is_ipv4();
    let outside = interfaces()?.into_iter().map(|found| found.address).filter(is_outside);
    // A machine without a network still has its loopback.
    let all = outside.chain([Ipv4Addr::LOCALHOST.into()]);
    Ok(all.map(|address| SocketAddr::new(address, port.port())).collect())
}

fn names(interfaces: &[Interface]) -> String {
    let mut names: Vec<&str> = interfaces.iter().map(|interface| interface.name.as_str()).collect();
    names.dedup();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_names_match_like_nccl() {
        let names = ["eth0", "eth10", "ib0", "lo"];
        let matching =
            |list: &str| -> Vec<&str> { names.into_iter().filter(|name| matches(list, name)).collect() };
        assert_eq!(matching("eth"), ["eth0", "eth10"]);
        assert_eq!(matching("=eth0"), ["eth0"]);
        assert_eq!(matching("=eth1"), [""; 0]);
        assert_eq!(matching("^lo,eth"), ["ib0"]);
        assert_eq!(matching("^=eth0"), ["eth10", "ib0", "lo"]);
        assert_eq!(matching("ib,lo"), ["ib0", "lo"]);
    }

    #[test]
    fn fsdp_ifname_overrides_nccl_and_unknown_is_rejected() {
        let at = |name: &str, last| Interface {
            name: name.to_owned(),
            address: Ipv4Addr::new(10, 0, 0, last).into(),
        };
        let there = [at("eth0", 1), at("ib0", 2)];
        let both = |name: &str| Some(if name.starts_with("FSDP") { "ib" } else { "eth" }.to_owned());
        assert_eq!(find_requested(&both, &there).unwrap(), Some(there[1].address));
        assert_eq!(find_requested(&|_| None, &there).unwrap(), None);
        let error = find_requested(&|_| Some("en".to_owned()), &there).unwrap_err();
        assert_eq!(
            error.to_string(),
            "FSDP_SOCKET_IFNAME is `en`, which matches none of the network interfaces eth0, ib0"
        );
    }

    #[test]
    fn loopback_is_reached_from_loopback_address() {
        let leader = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        assert_eq!(towards(leader).unwrap(), Ipv4Addr::LOCALHOST);
        assert!(interfaces().unwrap().iter().any(|interface| interface.address == Ipv4Addr::LOCALHOST));
    }
}
