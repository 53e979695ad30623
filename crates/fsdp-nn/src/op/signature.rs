//! What an operation reads and writes.

use fsdp_core::DType;

use super::{HeadDims, LinearDims, Op};

/// The element type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The float dtype that all values of a call share.
    Value,
    /// The master dtype of the values.
    Statistic,
    /// Any float dtype: slots of gradients have their own.
    Gradient,
    /// A dtype of its own.
    Of(DType),
}

/// What is done to an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read.
    Read,
    /// It is overwritten.
    Overwrite,
    /// It is overwritten, or added to where the call says so.
    Add,
    /// It is read, and then overwritten.
    Update,
    /// Its contents do not matter before or after.
    Scratch,
}

/// One operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Role {
    /// What it is called.
    pub name: &'static str,
    /// Elements.
    pub len: usize,
    /// Whether there may be more elements.
    pub or_more: bool,
    /// Elements that are touched: of a table that is looked up, or scratch that is used again, not its length.
    pub touched: usize,
    /// Their type.
    pub kind: Kind,
    /// What is done to it.
    pub access: Access,
}

impl Role {
    fn new(name: &'static str, len: usize, kind: Kind, access: Access) -> Self {
        Self { name, len, or_more: false, touched: len, kind, access }
    }

    fn touching(self, touched: usize) -> Self {
        Self { touched, ..self }
    }

    fn or_more(self, touched: usize) -> Self {
        Self { or_more: true, touched, ..self }
    }
}

/// The operands of an operation, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// What is only read.
    pub reads: Vec<Role>,
    /// What is written.
    pub writes: Vec<Role>,
}

fn read(name: &'static str, len: usize) -> Role {
    Role::new(name, len, Kind::Value, Access::Read)
}

fn statistic(name: &'static str, len: usize) -> Role {
    Role::new(name, len, Kind::Statistic, Access::Read)
}

fn ids(name: &'static str, len: usize) -> Role {
    Role::new(name, len, Kind::Of(DType::U32), Access::Read)
}

fn write(name: &'static str, len: usize, access: Access) -> Role {
    Role::new(name, len, Kind::Value, access)
}

fn gradient(name: &'static str, len: usize) -> Role {
    Role::new(name, len, Kind::Gradient, Access::Add)
}

fn losses(rows: usize) -> Role {
    Role::new("losses", rows, Kind::Of(DType::F64), Access::Overwrite)
}

impl Op {
    /// What it reads and writes.
    pub fn signature(&self) -> Signature {
        use Access::{Overwrite, Update};
        let (reads, writes) = match *self {
            Op::Linear { .. }
            | Op::LinearBackwardInput { .. }
            | Op::LinearBackwardWeight { .. }
            | Op::ColumnSums { .. } => self.linear(),
            Op::Embedding { .. } | Op::EmbeddingBackward { .. } | Op::Positions { .. } => self.lookup(),
            Op::RmsNorm { .. }
            | Op::RmsNormBackward { .. }
            | Op::LayerNorm { .. }
            | Op::LayerNormBackwardInput { .. }
            | Op::LayerNormBackwardWeight { .. } => self.norm(),
            Op::Rope { dims, .. } => {
                let rotated = dims.rows() * (dims.heads + dims.kv_heads) * dims.head_dim;
                (vec![], vec![write("qkv", dims.rows() * dims.packed(), Update).touching(rotated)])
            }
            Op::Attention { dims, .. } => {
                let lse = Role::new("lse", dims.rows() * dims.heads, Kind::Statistic, Overwrite);
                let packed = dims.rows() * dims.packed();
                (vec![read("qkv", packed)], vec![write("y", dims.output_len(), Overwrite), lse])
            }
            Op::AttentionBackward { dims, .. } => {
                let (packed, len) = (dims.rows() * dims.packed(), dims.output_len());
                let lse = statistic("lse", dims.rows() * dims.heads);
                let reads = vec![read("qkv", packed), read("y", len), lse, read("dy", len)];
                (reads, vec![write("dqkv", packed, Overwrite)])
            }
            Op::Swiglu { len } => {
                (vec![read("gate", len), read("up", len)], vec![write("y", len, Overwrite)])
            }
            Op::SwigluBackward { len } => (
                vec![read("gate", len), read("up", len), read("dy", len)],
                vec![write("dgate", len, Overwrite), write("dup", len, Overwrite)],
            ),
            Op::SwigluBackwardAgain { len } => (
                vec![read("gate", len), read("up", len)],
                vec![write("dy", len, Update), write("dgate", len, Overwrite), write("dup", len, Overwrite)],
            ),
            Op::Gelu { len } | Op::Copy { len } => (vec![read("x", len)], vec![write("y", len, Overwrite)]),
            Op::GeluBackward { len } => {
                (vec![read("x", len), read("dy", len)], vec![write("dx", len, Overwrite)])
            }
            Op::GeluBackwardAgain { len } => {
                (vec![read("x", len)], vec![write("dy", len, Update), write("dx", len, Overwrite)])
            }
            Op::Add { len } => (vec![read("a", len), read("b", len)], vec![write("y", len, Overwrite)]),
            Op::Accumulate { len } => (vec![read("x", len)], vec![write("y", len, Update)]),
            Op::Dropout { len, .. } => (vec![], vec![write("x", len, Update)]),
            Op::HeadLoss { .. }
            | Op::HeadLossBackward { .. }
            | Op::HeadLogits { .. }
            | Op::CrossEntropy { .. }
            | Op::CrossEntropyBackward { .. } => self.head(),
        };
        Signature { reads, writes }
    }

    fn linear(&self) -> (Vec<Role>, Vec<Role>) {
        match *self {
            Op::Linear { dims, bias } => {
                let mut reads = vec![read("x", dims.rows * dims.inputs), weight(dims)];
                reads.extend(bias.then(|| read("bias", dims.outputs)));
                let y = write("y", dims.y_len(), Access::Overwrite).or_more(dims.rows * dims.outputs);
                (reads, vec![y])
            }
            Op::LinearBackwardInput { dims } => {
                let dx = write("dx", dims.rows * dims.inputs, Access::Add);
                (vec![strided(dims), weight(dims)], vec![dx])
            }
            Op::LinearBackwardWeight { dims } => {
                let reads = vec![read("x", dims.rows * dims.inputs), strided(dims)];
                (reads, vec![gradient("dweight", dims.inputs * dims.outputs)])
            }
            Op::ColumnSums { rows, columns, stride } => {
                let len = rows.saturating_sub(1) * stride + columns;
                (vec![read("dy", len).or_more(rows * columns)], vec![gradient("sums", columns)])
            }
            _ => unreachable!("{} is no linear map", self.name()),
        }
    }

    fn lookup(&self) -> (Vec<Role>, Vec<Role>) {
        match *self {
            Op::Embedding { rows, width, table_rows } => {
                let table = read("table", table_rows * width).touching(rows * width);
                (vec![ids("ids", rows), table], vec![write("y", rows * width, Access::Add)])
            }
            Op::EmbeddingBackward { rows, width, table_rows } => {
                let reads = vec![ids("ids", rows), read("dy", rows * width)];
                (reads, vec![gradient("dtable", table_rows * width)])
            }
            Op::Positions { samples, seq } => {
                (vec![], vec![Role { access: Access::Overwrite, ..ids("ids", samples * seq) }])
            }
            _ => unreachable!("{} is no look-up", self.name()),
        }
    }

    fn norm(&self) -> (Vec<Role>, Vec<Role>) {
        use Access::{Add, Overwrite};
        let stats = |name, len| Role::new(name, len, Kind::Statistic, Overwrite);
        match *self {
            Op::RmsNorm { rows, width, .. } => (
                vec![read("x", rows * width), read("weight", width)],
                vec![write("y", rows * width, Overwrite), stats("rstd", rows)],
            ),
            Op::RmsNormBackward { rows, width, weight } => {
                let len = rows * width;
                let reads =
                    vec![read("x", len), read("weight", width), statistic("rstd", rows), read("dy", len)];
                let mut writes = vec![write("dx", len, Add)];
                writes.extend(weight.then(|| gradient("dweight", width)));
                (reads, writes)
            }
            Op::LayerNorm { rows, width, .. } => (
                vec![read("x", rows * width), read("weight", width), read("bias", width)],
                vec![write("y", rows * width, Overwrite), stats("stats", 2 * rows)],
            ),
            Op::LayerNormBackwardInput { rows, width } => {
                let len = rows * width;
                let stats = statistic("stats", 2 * rows);
                (
                    vec![read("x", len), read("weight", width), stats, read("dy", len)],
                    vec![write("dx", len, Add)],
                )
            }
            Op::LayerNormBackwardWeight { rows, width } => {
                let len = rows * width;
                let reads = vec![read("x", len), statistic("stats", 2 * rows), read("dy", len)];
                (reads, vec![gradient("dweight", width)])
            }
            _ => unreachable!("{} is no norm", self.name()),
        }
    }

    fn head(&self) -> (Vec<Role>, Vec<Role>) {
        let reads = |dims: HeadDims| {
            let HeadDims { rows, hidden, vocab, .. } = dims;
            vec![read("x", rows * hidden), read("weight", vocab * hidden), ids("targets", rows)]
        };
        let logits = |dims: HeadDims, kind| {
            Role::new("logits", dims.chunk_len(), kind, Access::Scratch).or_more(dims.rows * dims.vocab)
        };
        match *self {
            Op::HeadLoss { dims } => (reads(dims), vec![losses(dims.rows), logits(dims, Kind::Statistic)]),
            Op::HeadLossBackward { dims, weight, rounds } => {
                let dx = write("dx", dims.rows * dims.hidden, Access::Overwrite);
                let mut writes = vec![losses(dims.rows), logits(dims, Kind::Statistic), dx];
                writes.extend(weight.then(|| gradient("dweight", dims.vocab * dims.hidden)));
                writes.extend(rounds.then(|| Role { name: "dlogits", ..logits(dims, Kind::Value) }));
                (reads(dims), writes)
            }
            Op::HeadLogits { dims } => {
                let len = dims.rows * dims.vocab;
                let y = Role::new("logits", len, Kind::Statistic, Access::Overwrite).or_more(len);
                (reads(dims)[..2].to_vec(), vec![y])
            }
            Op::CrossEntropy { rows, vocab } => {
                let logits = Role::new("logits", rows * vocab, Kind::Gradient, Access::Read);
                (vec![logits, ids("targets", rows)], vec![losses(rows)])
            }
            Op::CrossEntropyBackward { rows, vocab, rounds } => {
                let kind = if rounds { Kind::Statistic } else { Kind::Gradient };
                let mut writes = vec![Role::new("logits", rows * vocab, kind, Access::Update), losses(rows)];
                writes.extend(rounds.then(|| write("dlogits", rows * vocab, Access::Overwrite)));
                (vec![ids("targets", rows)], writes)
            }
            _ => unreachable!("{} is no head", self.name()),
        }
    }
}

fn weight(dims: LinearDims) -> Role {
    read("weight", dims.inputs * dims.outputs)
}

fn strided(dims: LinearDims) -> Role {
    read("dy", dims.y_len()).or_more(dims.rows * dims.outputs)
}
