//! Random checkpoints on disk for tests, together with their elements, in every layout that a format may have.
//!
//! They belong to no format: the test knows the bytes of each tensor in C order, and scatters them over files as chunks
//! of all kinds, in plain and compressed sources, protected by checksums.

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use crate::{
    checkpoint::{Checkpoint, Chunk, Key, Protection, Region, Role, Source, Tensor},
    digest::DigestKind,
    floats,
    safetensors::TensorType,
};

/// A random number generator, by its state.
pub(crate) struct Seeded(pub(crate) u64);

impl Seeded {
    /// Returns a number below `end`, or 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).checked_rem(end).unwrap_or(0)
    }
}

/// A checkpoint and the bytes of its tensors in C order.
pub(crate) struct RandomCheckpoint {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) bytes: BTreeMap<String, Vec<u8>>,
}

/// A source under construction.
struct Growing {
    bytes: Vec<u8>,
    /// Whether it is stored as a compressed item.
    is_zstd: bool,
}

impl RandomCheckpoint {
    /// Writes a checkpoint into a directory.
    pub(crate) fn write(random: &mut Seeded, dir: &Path) -> RandomCheckpoint {
        fs::create_dir_all(dir).unwrap();
        let mut growing: Vec<Growing> = (0..1 + random.below(4))
            .map(|_| Growing { bytes: Vec::new(), is_zstd: random.below(3) == 0 })
            .collect();
        let mut made = RandomCheckpoint {
            checkpoint: Checkpoint { path: dir.to_owned(), ..Checkpoint::default() },
            bytes: BTreeMap::new(),
        };
        for number in 0..1 + random.below(6) {
            let name = format!("tensor.{number}");
            let shape: Vec<u64> = (0..random.below(4)).map(|_| random.below(7)).collect();
            // Types that every target has, for a tensor of this shape.
            let is_writable =
                |ty: &TensorType| ty.torch_name().is_some() && (ty.values() == 1 || !shape.is_empty());
            let types: Vec<TensorType> = TensorType::all().filter(is_writable).collect();
            let dtype = types[random.below(types.len() as u64) as usize];
            let len: u64 = shape.iter().product();
            let bytes = random_bytes(random, dtype, len);
            let chunks = made.scatter(random, &mut growing, dtype, &shape, &bytes);
            let path = vec![Key::Name("tensor".into()), Key::Index(number)];
            let tensor = Tensor { path, role: Role::Model, dtype, shape, chunks };
            made.checkpoint.tensors.insert(name.clone(), tensor);
            made.bytes.insert(name, bytes);
        }
        made.checkpoint.sources =
            growing.iter().enumerate().map(|(n, source)| source.store(dir, n)).collect();
        made
    }

    /// Writes one-dimensional tensors into one file, each flat and protected.
    pub(crate) fn flat(dir: &Path, tensors: &BTreeMap<String, (TensorType, Vec<u8>)>) -> RandomCheckpoint {
        fs::create_dir_all(dir).unwrap();
        let path = dir.join("data");
        let mut made = RandomCheckpoint {
            checkpoint: Checkpoint { path: dir.to_owned(), ..Checkpoint::default() },
            bytes: BTreeMap::new(),
        };
        let mut data = Vec::new();
        for (name, (dtype, bytes)) in tensors {
            let len = (bytes.len() / dtype.size_bytes()) as u64;
            let range = data.len() as u64..(data.len() + bytes.len()) as u64;
            data.extend(bytes);
            let chunks = vec![Chunk { region: Region::Flat(0..len), source: 0, offset: range.start }];
            let path = vec![Key::Name(name.clone())];
            let tensor = Tensor { path, role: Role::Model, dtype: *dtype, shape: vec![len], chunks };
            made.checkpoint.tensors.insert(name.clone(), tensor);
            made.bytes.insert(name.clone(), bytes.clone());
            let (digest, what) = (DigestKind::Crc32.of(bytes), format!("tensor `{name}`"));
            made.checkpoint.protections.push(Protection { source: 0, range, digest, what });
        }
        fs::write(&path, &data).unwrap();
        made.checkpoint.sources = vec![Source::File { path, len: data.len() as u64 }];
        made
    }

    /// Returns elements of a tensor converted to another dtype, one by one through `f64`.
    pub(crate) fn oracle(&self, name: &str, elements: Range<u64>, dtype: TensorType) -> Vec<u8> {
        let from = self.checkpoint.tensors[name].dtype;
        let size = from.size_bytes() as u64;
        let bytes = &self.bytes[name][(elements.start * size) as usize..(elements.end * size) as usize];
        if from == dtype {
            return bytes.to_vec();
        }
        let convert_one = |element: &[u8]| {
            let mut value = [0; 8];
            floats::between(from, TensorType::F64, element, &mut value).unwrap();
            let mut out = vec![0; dtype.size_bytes()];
            floats::between(TensorType::F64, dtype, &value, &mut out).unwrap();
            out
        };
        bytes.chunks(size as usize).flat_map(convert_one).collect()
    }

    /// Whether any element is stored in this file.
    pub(crate) fn is_needed(&self, path: &PathBuf) -> bool {
        let mut chunks = self.checkpoint.tensors.values().flat_map(|tensor| &tensor.chunks);
        chunks.any(|chunk| !chunk.region.is_empty() && self.checkpoint.sources[chunk.source].path() == path)
    }

    /// Stores the elements of a tensor in sources, as chunks that cover it.
    fn scatter(
        &mut self,
        random: &mut Seeded,
        growing: &mut [Growing],
        dtype: TensorType,
        shape: &[u64],
        bytes: &[u8],
    ) -> Vec<Chunk> {
        let size = dtype.size_bytes();
        let regions = if random.below(2) == 0 {
            flat_regions(random, bytes.len() / size)
        } else {
            boxes(random, shape)
        };
        let mut chunks = Vec::new();
        for region in regions {
            let source = random.below(growing.len() as u64) as usize;
            let target = &mut growing[source].bytes;
            target.extend(vec![0xee; random.below(12) as usize]);
            let offset = target.len();
            match &region {
                Region::Flat(range) => {
                    target.extend(&bytes[range.start as usize * size..range.end as usize * size]);
                }
                Region::Box { offsets, sizes, strides } => {
                    for index in indices(sizes) {
                        let at: u64 = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
                        let at = offset + at as usize * size;
                        target.resize(target.len().max(at + size), 0xdd);
                        let from = index.iter().zip(offsets).zip(shape);
                        let from =
                            from.fold(0, |flat, ((i, offset), dim)| flat * dim + i + offset) as usize * size;
                        target[at..at + size].copy_from_slice(&bytes[from..from + size]);
                    }
                }
            }
            let range = offset as u64..target.len() as u64;
            if random.below(2) == 0 {
                let kind = [DigestKind::Crc32, DigestKind::Crc64][random.below(2) as usize];
                let (digest, what) = (kind.of(&target[offset..]), "chunk".to_owned());
                self.checkpoint.protections.push(Protection { source, range, digest, what });
            }
            chunks.push(Chunk { region, source, offset: offset as u64 });
        }
        chunks
    }
}

impl Growing {
    fn store(&self, dir: &Path, number: usize) -> Source {
        let path = dir.join(format!("source-{number}"));
        if !self.is_zstd {
            fs::write(&path, &self.bytes).unwrap();
            return Source::File { path, len: self.bytes.len() as u64 };
        }
        let compressed = zstd::encode_all(&self.bytes[..], 1).unwrap();
        let range = 3..3 + compressed.len() as u64;
        fs::write(&path, [b"???", &compressed[..], b"!"].concat()).unwrap();
        Source::Zstd { path, range, decoded_len_max: self.bytes.len() as u64 }
    }
}

/// Random element bytes; floats get values that are finite in every float dtype.
fn random_bytes(random: &mut Seeded, dtype: TensorType, len: u64) -> Vec<u8> {
    if !dtype.is_convertible() {
        return (0..len * dtype.size_bytes() as u64).map(|_| random.below(256) as u8).collect();
    }
    let values = (0..len).flat_map(|_| ((random.below(20_000) as f64 - 10_000.0) * 0.001).to_le_bytes());
    let values: Vec<u8> = values.collect();
    let mut bytes = vec![0; len as usize * dtype.size_bytes()];
    floats::between(TensorType::F64, dtype, &values, &mut bytes).unwrap();
    bytes
}

fn flat_regions(random: &mut Seeded, len: usize) -> Vec<Region> {
    let mut cuts: Vec<u64> = (0..random.below(4)).map(|_| random.below(len as u64 + 1)).collect();
    cuts.extend([0, len as u64]);
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| Region::Flat(cut[0]..cut[1])).collect()
}

/// A grid of boxes, each with its dimensions in a random order in its source, some with gaps.
fn boxes(random: &mut Seeded, shape: &[u64]) -> Vec<Region> {
    let mut grid: Vec<(Vec<u64>, Vec<u64>)> = vec![(Vec::new(), Vec::new())];
    for &dim in shape {
        let cut = random.below(dim + 1);
        let parts = if random.below(2) == 0 { vec![(0, cut), (cut, dim - cut)] } else { vec![(0, dim)] };
        let extend = |(offsets, sizes): &(Vec<u64>, Vec<u64>)| {
            let with = |&(offset, size): &(u64, u64)| {
                ([&offsets[..], &[offset]].concat(), [&sizes[..], &[size]].concat())
            };
            parts.iter().map(with).collect::<Vec<_>>()
        };
        grid = grid.iter().flat_map(extend).collect();
    }
    let region = |(offsets, sizes): (Vec<u64>, Vec<u64>)| {
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|_| random.below(100));
        let mut strides = vec![1; sizes.len()];
        let mut stride = 1 + random.below(2) * random.below(3);
        for &dim in order.iter().rev() {
            strides[dim] = stride;
            stride *= sizes[dim].max(1) + random.below(2);
        }
        Region::Box { offsets, sizes, strides }
    };
    grid.into_iter().map(region).collect()
}

/// Returns all indices of a box.
fn indices(sizes: &[u64]) -> Vec<Vec<u64>> {
    let mut all: Vec<Vec<u64>> = vec![Vec::new()];
    for &size in sizes {
        let extend = |index: &Vec<u64>| (0..size).map(|i| [&index[..], &[i]].concat()).collect::<Vec<_>>();
        all = all.iter().flat_map(extend).collect();
    }
    all
}
