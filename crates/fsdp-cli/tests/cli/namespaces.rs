//! Two nodes: network namespaces of this machine, connected by a link that can be cut and can lose packets.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::launchers::programs;
use crate::processes::{bits, newest};
use crate::shell::{Shell, may_make_namespaces};
use crate::support::{Ran, Sandbox};
use crate::world::wait_until;

/// Creates the nodes `a` and `b`, which share all files.
const NODES: &str = "mkdir -p /run/netns && mount -t tmpfs none /run/netns && ip netns add a && ip netns add b \
    && ip link add va netns a type veth peer name vb netns b \
    && ip -n a address add 10.78.0.1/24 dev va && ip -n b address add 10.78.0.2/24 dev vb \
    && ip -n a link set va up && ip -n b link set vb up && ip -n a link set lo up && ip -n b link set lo up";

/// Two nodes, each with half of the processes.
struct Nodes<'a> {
    shell: Shell<'a>,
    processes: usize,
}

impl<'a> Nodes<'a> {
    /// Creates two nodes; `None` if this machine does not allow it.
    fn start(sandbox: &'a Sandbox, processes: usize) -> Option<Self> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh"]);
        let nodes =
            may_make_namespaces().then(|| Self { shell: Shell::start(sandbox, command), processes })?;
        nodes.shell.succeed("nodes", NODES);
        Some(nodes)
    }

    fn begin(&self, args: &str) {
        let local = self.processes / 2;
        for process in 0..self.processes {
            let node = if process < local { "a" } else { "b" };
            let variables = format!(
                "FSDP_PROCESS={process} FSDP_PROCESSES={} FSDP_LOCAL_PROCESS={} FSDP_LOCAL_PROCESSES={local}",
                self.processes,
                process % local
            );
            let command = format!(
                "ip netns exec {node} env {variables} FSDP_DIRECT_READS=0 FSDP_RENDEZVOUS=10.78.0.1:29500 fsdp train run.toml {args}"
            );
            self.shell.begin(&format!("process{process}"), &command);
        }
    }

    fn have_ended(&self) -> bool {
        (0..self.processes).all(|process| self.shell.has_ended(&format!("process{process}")))
    }

    fn end(&self) -> Vec<Ran> {
        (0..self.processes).map(|process| self.shell.end(&format!("process{process}"))).collect()
    }

    /// Runs all processes, which must succeed.
    fn succeed(&self, args: &str) -> Vec<Ran> {
        self.begin(args);
        let ran = self.end();
        for (process, ran) in ran.iter().enumerate() {
            assert_eq!(ran.code, Some(0), "process {process}: {}", ran.stderr);
        }
        ran
    }
}

#[test]
fn two_nodes_match_threads_bitwise_and_resume_after_cut_link() {
    let sandbox = Sandbox::new();
    let Some(nodes) = Nodes::start(&sandbox, 4) else { return };
    let four = "--set run.ranks=4 --set train.global_batch_size=16";
    sandbox.succeed(&format!("train run.toml {four} --set run.out_dir=threads"));
    let ran = nodes.succeed(&format!("{four} --set run.out_dir=nodes"));
    assert!(bits(&sandbox, "nodes") == bits(&sandbox, "threads"));
    assert_eq!(ran[3].stderr, "");

    let again = format!("{four} --resume --set checkpoint.every=2 --set run.heartbeat_s=0.4");
    nodes.begin(&format!("{again} --set train.steps=1000000"));
    wait_until("the second checkpoint", || newest(&sandbox) > 3);
    nodes.shell.succeed("cut", "ip -n b link set vb down");
    let begin = Instant::now();
    wait_until("the end of all processes", || nodes.have_ended());
    // A process is dead after 15 silent heartbeats. On a loaded machine its last one may have been long before the cut.
    assert!(begin.elapsed() > Duration::from_secs(3), "{:?}", begin.elapsed());
    let ran = nodes.end();
    assert_eq!(ran.iter().map(|ran| ran.code).collect::<Vec<_>>(), [Some(75); 4], "{}", ran[0].stderr);
    let stderr = &ran[0].stderr;
    assert!(stderr.contains("process 2 (pid") || stderr.contains("process 3 (pid"), "{stderr}");
    // The other node cannot see which process is lost there, only that its leader is silent.
    let record = sandbox.read("out/flight-2.jsonl");
    assert!(record.lines().next().unwrap().contains("process 0 (pid"), "{record}");

    nodes.shell.succeed("mend", "ip -n b link set vb up");
    let steps = newest(&sandbox) + 2;
    nodes.succeed(&format!("{again} --set train.steps={steps}"));
    sandbox.succeed(&format!("train run.toml {four} --set run.out_dir=whole --set train.steps={steps}"));
    for key in ["loss", "grad_norm", "lr"] {
        assert_eq!(sandbox.column("out", key), sandbox.column("whole", key), "{key}");
    }
    let model = |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    assert!(model("out") == model("whole"));
}

#[test]
fn packet_loss_does_not_change_results() {
    let sandbox = Sandbox::new();
    let lossy = if !programs(&["nft"], "").is_empty() {
        "nft add table ip t && nft 'add chain ip t in { type filter hook input priority 0; }' \
         && nft 'add rule ip t in numgen random mod 100 < 20 drop'"
    } else if !programs(&["iptables"], "").is_empty() {
        "iptables -A INPUT -m statistic --mode random --probability 0.2 -j DROP"
    } else {
        println!("skipped: neither nft nor iptables is on PATH");
        return;
    };
    let Some(nodes) = Nodes::start(&sandbox, 2) else { return };
    sandbox.succeed("train run.toml --set run.out_dir=threads");
    for node in ["a", "b"] {
        let ran = nodes.shell.run("loss", &format!("ip netns exec {node} sh -c \"{lossy}\""));
        if ran.code != Some(0) {
            println!("skipped: packets cannot be dropped here: {}", ran.stderr);
            return;
        }
    }
    // A short retransmission timeout, since packets of a test do not travel far.
    nodes.shell.succeed("route", "ip -n a route change 10.78.0.0/24 dev va src 10.78.0.1 rto_min 10ms");
    nodes.shell.succeed("route", "ip -n b route change 10.78.0.0/24 dev vb src 10.78.0.2 rto_min 10ms");
    nodes.succeed("");
    assert!(bits(&sandbox, "out") == bits(&sandbox, "threads"));
    let repeated = nodes.shell.succeed("lost", "ip netns exec a cat /proc/net/snmp").stdout;
    let tcp: Vec<&str> = repeated.lines().filter(|line| line.starts_with("Tcp:")).collect();
    let column = tcp[0].split_whitespace().position(|name| name == "RetransSegs").unwrap();
    let segments: u64 = tcp[1].split_whitespace().nth(column).unwrap().parse().unwrap();
    assert!(segments > 5, "packets were lost: {repeated}");
}
