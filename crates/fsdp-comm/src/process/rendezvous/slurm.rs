//! The rendezvous of a Slurm step: the node of process 0, and a port on which all processes agree.

/// The range of ports: below Linux's ephemeral ports (from 32768 on), from which Slurm also takes those of srun by
/// default.
const PORTS: std::ops::Range<u64> = 20_000..32_000;

/// Returns the first host of the step, and a port derived from the job and step ids.
pub(super) fn first_host(variable: &dyn Fn(&str) -> Option<String>) -> Option<(String, u16)> {
    let number = |name| variable(name)?.trim().parse::<u64>().ok();
    let host = first_of(&variable("SLURM_STEP_NODELIST")?)?;
    let (job, step) = (number("SLURM_JOB_ID")?, number("SLURM_STEP_ID")?);
    let port = PORTS.start + (job.wrapping_mul(31).wrapping_add(step)) % (PORTS.end - PORTS.start);
    Some((host, u16::try_from(port).ok()?))
}

/// The first host of a list in Slurm's notation: `n[1-4,7],m05`, `a[01-03]-ib`.
fn first_of(list: &str) -> Option<String> {
    let end = list.find(',').into_iter().chain(list.find('[')).min().unwrap_or(list.len());
    let prefix = &list[..end];
    let Some(group) = list[end..].strip_prefix('[') else {
        return (!prefix.is_empty()).then(|| prefix.to_owned());
    };
    let (group, rest) = group.split_once(']')?;
    let number = group.split([',', '-']).next()?;
    let suffix = rest.split(',').next()?;
    Some(format!("{prefix}{number}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_host_is_parsed_from_node_lists() {
        for (list, first) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("n[1-4]", "n1"),
            ("n[07-12,20],m1", "n07"),
            ("n[3,5]", "n3"),
            ("rack1-n[001-100]-ib", "rack1-n001-ib"),
            ("a,b[1-2]", "a"),
        ] {
            assert_eq!(first_of(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_of(""), None);
        assert_eq!(first_of("n[1-4"), None);
    }

    #[test]
    fn slurm_steps_and_jobs_get_different_ports() {
        let port = |job: &str, step: &str| {
            let values = [("SLURM_STEP_NODELIST", "n[1-2]"), ("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step)];
            let value = |name: &str| {
                values.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            };
            first_host(&value).unwrap().1
        };
        assert_ne!(port("17", "0"), port("17", "1"));
        assert_ne!(port("17", "0"), port("18", "0"));
        assert!(PORTS.contains(&u64::from(port("4294967295", "7"))));
        assert_eq!(first_host(&|_| None), None);
    }
}
