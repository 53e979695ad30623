//! Every small set of variables against the rule, written out slowly.

use super::*;

type Set = Vec<(&'static str, &'static str)>;

/// What the rule says.
#[derive(Debug, PartialEq)]
enum Rule {
    Alone,
    World(LaunchedBy, [usize; 4]),
    /// The error must name one of these variables.
    Wrong(Vec<&'static str>),
}

fn value(set: &Set, name: &str) -> Option<&'static str> {
    set.iter().find(|(variable, _)| *variable == name).map(|(_, value)| *value)
}

/// Whose variables these are.
fn decides(set: &Set) -> Option<LaunchedBy> {
    let has = |name: &str| value(set, name).is_some();
    for launcher in LaunchedBy::ALL {
        let [process, processes, local, locals] = launcher.variables();
        let started = match launcher {
            LaunchedBy::Hydra => {
                let others =
                    set.iter().any(|(name, _)| name.starts_with("MV2_") || name.starts_with("SLURM_STEP"));
                let is_task = value(set, "SLURM_PROCID").is_some_and(|number| number != "0");
                has(local) || has(locals) || ((has(process) || has(processes)) && !others && !is_task)
            }
            LaunchedBy::Srun => {
                has(processes) || has(locals) || value(set, process).is_some_and(|number| number != "0")
            }
            _ => has(process) || has(processes) || has(local) || has(locals),
        };
        if started {
            return Some(launcher);
        }
    }
    None
}

fn rule(set: &Set) -> Rule {
    let Some(launcher) = decides(set) else { return Rule::Alone };
    let names = launcher.variables();
    let [process, processes, local, locals] =
        names.map(|name| value(set, name).map(|value| value.parse::<usize>().map_err(|_| name)));
    let Some((process, processes)) = process.zip(processes) else { return Rule::Wrong(names[..2].to_vec()) };
    let (Ok(process), Ok(processes)) = (process, processes) else { return Rule::Wrong(names[..2].to_vec()) };
    if process >= processes {
        return Rule::Wrong(vec![names[0]]);
    }
    let implied = |of_one| if processes == 1 { Some(Ok(of_one)) } else { None };
    let (Some(Ok(local)), Some(Ok(locals))) = (local.or(implied(0)), locals.or(implied(1))) else {
        return Rule::Wrong(names[2..].to_vec());
    };
    if local >= locals || locals > processes {
        return Rule::Wrong(names[2..].to_vec());
    }
    if processes == 1 { Rule::Alone } else { Rule::World(launcher, [process, processes, local, locals]) }
}

fn check(set: &Set) {
    match (recognized(set), rule(set)) {
        (Ok(None), Rule::Alone) => {
            let is_only_one = super::super::is_only_one(&|name| value(set, name).map(str::to_owned));
            assert_eq!(is_only_one, decides(set).is_some(), "{set:?}");
        }
        (Ok(Some(_)), Rule::World(launcher, numbers)) => {
            assert_eq!(place(set), Some((launcher, numbers)), "{set:?}");
        }
        (Err(error), Rule::Wrong(names)) => {
            let text = error.to_string();
            assert!(names.iter().any(|name| text.contains(name)), "{set:?}: {text}: {names:?}");
        }
        (recognized, rule) => panic!("{set:?}: {recognized:?} instead of {rule:?}"),
    }
}

/// Every set of a launcher's variables, each one unset or with one of a few values.
fn sets(launcher: LaunchedBy) -> Vec<Set> {
    const VALUES: [&[&str]; 4] =
        [&["0", "1", "x", ""], &["1", "2", "3", "x"], &["0", "1", "x"], &["1", "2", "x"]];
    let node = if launcher == LaunchedBy::Srun { vec![("SLURM_NODEID", "0")] } else { Vec::new() };
    launcher.variables().into_iter().zip(VALUES).fold(vec![node], |sets, (name, values)| {
        let extend = |set: Set| {
            let with = |&value| [&set[..], &[(name, value)]].concat();
            let all: Vec<Set> = values.iter().map(with).collect();
            [vec![set], all].concat()
        };
        sets.into_iter().flat_map(extend).collect()
    })
}

/// None, one process, one of two, half a set, no number.
fn few(launcher: LaunchedBy) -> Vec<Set> {
    let names = launcher.variables();
    let with = |values: [&'static str; 4]| -> Set {
        let set = names.into_iter().zip(values).filter(|(_, value)| *value != "unset");
        set.chain((launcher == LaunchedBy::Srun).then_some(("SLURM_NODEID", "0"))).collect()
    };
    let values = [
        ["unset"; 4],
        ["0", "1", "0", "1"],
        ["1", "2", "1", "2"],
        ["unset", "2", "unset", "unset"],
        ["0", "unset", "unset", "unset"],
        ["x", "2", "0", "1"],
    ];
    values.map(with).to_vec()
}

#[test]
fn every_set_of_one_launcher_follows_rule() {
    LaunchedBy::ALL.into_iter().flat_map(sets).for_each(|set| check(&set));
}

#[test]
fn every_set_within_another_launcher_follows_rule() {
    for launcher in LaunchedBy::ALL {
        for outer in LaunchedBy::ALL.into_iter().filter(|outer| *outer != launcher) {
            let around = few(outer);
            for set in sets(launcher) {
                around.iter().for_each(|around| check(&[&set[..], around].concat()));
            }
        }
    }
}

#[test]
fn every_mixture_of_launchers_follows_rule() {
    let mixtures = LaunchedBy::ALL.into_iter().fold(vec![Set::new()], |mixtures, launcher| {
        let few = few(launcher);
        let with = |mixture: Set| few.iter().map(|set| [&mixture[..], set].concat()).collect::<Vec<_>>();
        mixtures.into_iter().flat_map(with).collect()
    });
    assert_eq!(mixtures.len(), 6_usize.pow(6));
    mixtures.iter().for_each(check);
}
