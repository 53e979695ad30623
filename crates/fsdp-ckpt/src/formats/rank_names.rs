//! File names that contain a rank, and the sets of files that belong together by their names.
//!
//! The conventions in use differ only in the words around the numbers. So the parser looks for one of these words,
//! followed by a rank and perhaps a number of ranks. Names only tell which files to open together; the contents of a
//! file tell its format.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::rank_fault::{disagrees, no_main_files, no_rank_files, same_rank, several_sets};
use crate::{
    error::{Error, Fault},
    file_io::{Files, directory_of},
};

/// Endings of `torch.save` files.
pub(super) const TORCH_ENDINGS: [&str; 4] = [".pth", ".pt", ".bin", ".ckpt"];

/// Maximum number of ranks that a message lists.
const LISTED_MAX: usize = 12;

/// An example of a rank file's name, for messages.
const EXAMPLE: &str = "model_world_size_4_rank_0.pt";

/// A file name with a rank in it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RankName {
    /// The name with `*` in place of the rank.
    pub(crate) pattern: String,
    /// The rank, counted as in the name.
    pub(crate) rank: usize,
    /// Number of ranks; `None` if the name does not contain it.
    pub(crate) world_size: Option<usize>,
}

impl RankName {
    /// Finds the rank in a name: `*_rank-00000001-of-00000004.pth` and `rank1-of-4-*` of PyTorch/XLA,
    /// `*_world_size_4_rank_1.pt` of VeRL, `*_rank1.bin` of Accelerate, `*zero_pp_rank_1_mp_rank_00_*.pt` of DeepSpeed,
    /// `shard_00001-of-00004.pt`. In a name without any of these words, the rank is the last number.
    pub(crate) fn parse(name: &str) -> Option<RankName> {
        if !TORCH_ENDINGS.iter().any(|ending| name.ends_with(ending)) {
            return None;
        }
        let start = start_of_rank(name)?;
        let digits = leading_digits(&name[start..]);
        let rank = digits.parse().ok()?;
        let rest = &name[start + digits.len()..];
        let before = &name[..start];
        let world_size = match rest.strip_prefix("-of-") {
            Some(rest) => leading_digits(rest),
            None => before.rsplit_once("world_size_").map_or("", |(_, rest)| leading_digits(rest)),
        };
        let world_size = world_size.parse().ok();
        Some(RankName { pattern: format!("{before}*{rest}"), rank, world_size })
    }
}

/// Position of the first digit of the rank.
fn start_of_rank(name: &str) -> Option<usize> {
    let after_word = name.find("rank").map(|at| at + "rank".len());
    let after_word = after_word.map(|at| at + usize::from(name[at..].starts_with(['-', '_'])));
    if let Some(start) = after_word.filter(|&at| name[at..].starts_with(|c: char| c.is_ascii_digit())) {
        return Some(start);
    }
    let stem = &name[..name.rfind('.')?];
    let end =
        stem.rfind("-of-").unwrap_or_else(|| stem.rfind(|c: char| c.is_ascii_digit()).map_or(0, |at| at + 1));
    let start = stem[..end].rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    (start < end).then_some(start)
}

/// The [`doubt`] in a number that nothing marks as a rank.
pub(crate) const DOUBTFUL: u8 = 2;

/// How doubtful it is that the number in names of this pattern is a rank: 0 if the pattern contains `rank`.
pub(crate) fn doubt(pattern: &str) -> u8 {
    match pattern {
        pattern if pattern.contains("rank") => 0,
        pattern if pattern.contains("*-of-") => 1,
        _ => DOUBTFUL,
    }
}

fn leading_digits(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    &text[..end]
}

/// The files of a set in rank order, without a gap.
pub(crate) type RankSet = Vec<PathBuf>;

/// Groups the names in a directory into sets, by pattern.
pub(crate) fn sets_of(names: &[String]) -> BTreeMap<String, Vec<(RankName, String)>> {
    let mut sets: BTreeMap<String, Vec<(RankName, String)>> = BTreeMap::new();
    for name in names {
        if let Some(found) = RankName::parse(name) {
            sets.entry(found.pattern.clone()).or_default().push((found, name.clone()));
        }
    }
    sets
}

/// The files of a set, if every rank is present exactly once.
///
/// # Errors
/// [`Error::Malformed`] names the ranks that are missing or present twice.
pub(crate) fn complete(dir: &Path, names: Vec<(RankName, String)>) -> Result<RankSet, Error> {
    let mut files: BTreeMap<usize, PathBuf> = BTreeMap::new();
    let mut world_size = 0;
    let doubt = names.first().map_or(0, |(found, _)| doubt(&found.pattern));
    if let [(_, only)] = &names[..]
        && doubt == DOUBTFUL
    {
        return Ok(vec![dir.join(only)]);
    }
    // Some names without `rank` count from 1.
    let first =
        if doubt > 0 { names.iter().map(|(found, _)| found.rank).min().unwrap_or(0).min(1) } else { 0 };
    for (mut found, name) in names {
        found.rank -= first;
        let path = dir.join(name);
        world_size = world_size.max(found.world_size.unwrap_or(0));
        if let Some(first) = files.insert(found.rank, path.clone()) {
            return Err(same_rank(found.rank, &first, &path).in_file(dir));
        }
    }
    let highest = files.keys().next_back().map_or(0, |rank| rank + 1);
    if world_size > 0 && highest > world_size {
        let (expected, because) = (format!("below {world_size}"), " by the world size in its name");
        return Err(disagrees("rank", expected, highest - 1, because).in_file(dir));
    }
    check_ranks(files.keys().copied(), world_size.max(highest)).map_err(|fault| fault.in_file(dir))?;
    Ok(files.into_values().collect())
}

/// A naming rule for companion files: a set with `main` in its pattern goes with the set that has `other` in its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Companion {
    pub(crate) main: &'static str,
    pub(crate) other: &'static str,
}

/// A set of model files and its companions.
#[derive(Clone, Debug)]
pub(crate) struct FoundSets {
    /// The model files.
    pub(crate) main: RankSet,
    /// The companion sets, in the order of the requested companions.
    pub(crate) companions: Vec<(Companion, RankSet)>,
}

/// Finds the only set in a directory, or the set that a file belongs to, and its companion sets.
///
/// # Errors
/// [`Error::Malformed`] if there is no set or more than one, or if ranks are missing.
pub(crate) fn find(path: &Path, companions: &[Companion]) -> Result<FoundSets, Error> {
    let files = Files::anywhere();
    let (dir, name) = match path.file_name() {
        Some(name) if !files.is_directory(path) => {
            (directory_of(path), Some(name.to_string_lossy().into_owned()))
        }
        _ => (path.to_owned(), None),
    };
    if name.as_ref().is_some_and(|name| RankName::parse(name).is_none()) {
        return Ok(FoundSets { main: vec![path.to_owned()], companions: Vec::new() });
    }
    let mut sets = sets_of(&files.list(&dir)?);
    let pattern = choose(&sets, name.as_deref(), companions).map_err(|fault| fault.in_file(path))?;
    let mut take = |pattern: &str| sets.remove(pattern).map(|names| complete(&dir, names)).transpose();
    let main = take(&pattern)?.expect("the pattern was chosen among the sets");
    let mut found = Vec::new();
    for &companion in companions.iter().filter(|companion| pattern.contains(companion.main)) {
        let set = take(&pattern.replace(companion.main, companion.other))?;
        found.extend(set.map(|set| (companion, set)));
    }
    Ok(FoundSets { main, companions: found })
}

/// Chooses the pattern of the set to open.
fn choose(
    sets: &BTreeMap<String, Vec<(RankName, String)>>,
    name: Option<&str>,
    companions: &[Companion],
) -> Result<String, Fault> {
    let main_of = |pattern: &str| {
        let mut mains = companions.iter().filter(|companion| pattern.contains(companion.other));
        mains.find_map(|c| Some(pattern.replace(c.other, c.main)).filter(|main| sets.contains_key(main)))
    };
    if let Some(name) = name {
        let found = RankName::parse(name).ok_or_else(|| no_rank_files(EXAMPLE))?;
        return Ok(main_of(&found.pattern).unwrap_or(found.pattern));
    }
    let least = sets.keys().map(|pattern| doubt(pattern)).min();
    let mains = sets.keys().filter(|pattern| main_of(pattern).is_none() && Some(doubt(pattern)) == least);
    let mains: Vec<&String> = mains.collect();
    // The pattern that the main files of a companion's pattern would have.
    let lost_main = |pattern: &String| {
        let companion = companions.iter().find(|companion| pattern.contains(companion.other))?;
        Some(pattern.replace(companion.other, companion.main))
    };
    match mains[..] {
        [] => Err(no_rank_files(EXAMPLE)),
        [first, ..] if mains.iter().all(|pattern| lost_main(pattern).is_some()) => {
            Err(no_main_files(&lost_main(first).unwrap_or_default(), first))
        }
        [pattern] => Ok(pattern.clone()),
        _ => Err(several_sets(&sets.keys().cloned().collect::<Vec<_>>())),
    }
}

/// Checks that the ranks from 0 up to `world_size` are all present.
pub(crate) fn check_ranks(present: impl Iterator<Item = usize>, world_size: usize) -> Result<(), Fault> {
    // A name may claim any number of ranks, so no more gaps are collected than a message needs.
    let mut ranks = Vec::new();
    let mut next = 0;
    for rank in present.chain([world_size]) {
        ranks.extend((next..rank).take(64 - ranks.len().min(64)));
        next = rank + 1;
    }
    if ranks.is_empty() {
        return Ok(());
    }
    let shown: Vec<String> = ranks.iter().take(LISTED_MAX).map(usize::to_string).collect();
    let missing = shown.join(", ") + if ranks.len() > LISTED_MAX { ", .." } else { "" };
    let way_out = "fetch them, every rank holds a part";
    Err(Fault::new(format!("the files of ranks {missing} of {world_size} are missing; {way_out}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(name: &str) -> (String, usize, Option<usize>) {
        let found = RankName::parse(name).unwrap();
        (found.pattern, found.rank, found.world_size)
    }

    #[test]
    fn rank_is_parsed_from_every_naming_convention() {
        let xla = "ckpt_rank-00000001-of-00000004.pth";
        assert_eq!(parsed(xla), ("ckpt_rank-*-of-00000004.pth".into(), 1, Some(4)));
        let trainer = "rank3-of-16-pytorch_model.bin";
        assert_eq!(parsed(trainer), ("rank*-of-16-pytorch_model.bin".into(), 3, Some(16)));
        let verl = "model_world_size_2_rank_0.pt";
        assert_eq!(parsed(verl), ("model_world_size_2_rank_*.pt".into(), 0, Some(2)));
        let accelerate = "pytorch_model_fsdp_1_rank12.bin";
        assert_eq!(parsed(accelerate), ("pytorch_model_fsdp_1_rank*.bin".into(), 12, None));
        let zero = "bf16_zero_pp_rank_5_mp_rank_00_optim_states.pt";
        assert_eq!(parsed(zero), ("bf16_zero_pp_rank_*_mp_rank_00_optim_states.pt".into(), 5, None));
        let numbered = "shard_00001-of-00002.pt";
        assert_eq!(parsed(numbered), ("shard_*-of-00002.pt".into(), 1, Some(2)));
        assert_eq!(parsed("ckpt_7.pt"), ("ckpt_*.pt".into(), 7, None));
        assert_eq!(["a_rank_*.pt", "a_*-of-2.pt", "a_*.pt"].map(doubt), [0, 1, 2]);
        for other in ["model.pt", "rank.pt", "rank-0.done", "rank99999999999999999999999.bin"] {
            assert_eq!(RankName::parse(other), None, "{other}");
        }
    }

    fn completed(names: &[&str]) -> Result<RankSet, Error> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let (_, set) = sets_of(&names).pop_first().unwrap();
        complete(Path::new("dir"), set)
    }

    #[test]
    fn rank_sets_are_ordered_and_must_be_complete() {
        let set = completed(&["a_rank10.bin", "a_rank2.bin", "a_rank1.bin"]).unwrap_err();
        let message = set.to_string();
        assert!(message.contains("the files of ranks 0, 3, 4, 5, 6, 7, 8, 9 of 11 are missing"), "{message}");
        let set = completed(&["a_rank1.bin", "other.bin", "a_rank0.bin"]).unwrap();
        assert_eq!(set, [Path::new("dir/a_rank0.bin"), Path::new("dir/a_rank1.bin")]);
        let message = completed(&["x_rank-0-of-3.pth", "x_rank-2-of-3.pth"]).unwrap_err().to_string();
        assert_eq!(
            message,
            "dir: the files of ranks 1 of 3 are missing; fetch them, every rank holds a part"
        );
    }

    #[test]
    fn names_without_rank_word_may_be_one_based_or_single() {
        let set = completed(&["s_00002-of-00002.pt", "s_00001-of-00002.pt"]).unwrap();
        assert_eq!(set, [Path::new("dir/s_00001-of-00002.pt"), Path::new("dir/s_00002-of-00002.pt")]);
        let message = completed(&["s_00000-of-00003.pt", "s_00002-of-00003.pt"]).unwrap_err().to_string();
        assert!(message.contains("the files of ranks 1 of 3 are missing"), "{message}");
        assert_eq!(completed(&["step_100.pt"]).unwrap(), [Path::new("dir/step_100.pt")]);
    }

    #[test]
    fn rejects_duplicate_and_out_of_range_ranks() {
        let message = completed(&["x_rank-1-of-2.pth", "x_rank-01-of-2.pth"]).unwrap_err().to_string();
        assert!(message.contains("are both of rank 1"), "{message}");
        let message = completed(&["x_rank-0-of-1.pth", "x_rank-1-of-1.pth"]).unwrap_err().to_string();
        assert!(message.contains("its rank is 1, where below 1 was expected"), "{message}");
    }

    #[test]
    fn huge_world_size_in_name_is_rejected_cheaply() {
        let fault = completed(&["x_rank-0-of-99999999999999999.pth"]).unwrap_err();
        assert!(fault.to_string().contains("ranks 1, 2, 3"), "{fault}");
    }
}
