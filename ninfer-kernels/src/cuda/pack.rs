//! Stored matrices into device records: staged piece by piece through pinned memory, repacked on the device.

use std::sync::{Arc, Mutex, PoisonError};

use ninfer_core::backend::Synthetic;
use ninfer_core::format::{ActivationPrecision, FP8_BLOCK, Fp8Scales, GROUP_PAD, GlobalScale, NVFP4_GROUP};
use ninfer_core::{DType, Error, PackedData, PackedRef, Result, WeightFormat};

use super::driver::{Context, Event, Launch, Memory, Pinned, Stream};
use super::kernels::Kernels;
use super::weight::{CudaWeight, Piece, RECORD_COLUMNS, ROW_BLOCK, RecordFormat, WeightArg, WeightLayout};

/// Bytes of stored data that are on their way at a time.
const PIECE: usize = 32 << 20;
/// Threads of a block of the pack kernels.
const BLOCK: u32 = 64;
/// Most rows of a launch dimension.
const GRID_ROWS: usize = 65_535;

/// `Pack` of `pack.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PackArg {
    to: WeightArg,
    codes: u64,
    high: u64,
    scales: u64,
    rows: i32,
    row: i32,
    kind: i32,
    unused: i32,
}

/// `Fill` of `pack.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FillArg {
    to: WeightArg,
    seed: u64,
    records: i64,
    scale: f32,
    unused: i32,
}

/// One half of the staging: pinned memory, its copy on the device, and when that was last read.
struct Stage {
    host: Pinned,
    device: Memory,
    used: Event,
}

/// Brings weights to the device; a stream of its own, so that loading never waits for a queue.
pub(super) struct Loader {
    context: Arc<Context>,
    state: Mutex<Option<State>>,
}

struct State {
    stream: Stream,
    stages: [Stage; 2],
    next: usize,
}

impl Loader {
    pub(super) fn new(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), state: Mutex::new(None) }
    }

    /// Gives the staging memory back; the next weight takes it again.
    pub(super) fn release(&self) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(super) fn prepare(&self, kernels: &Kernels, parts: &[PackedRef<'_>]) -> Result<CudaWeight> {
        let (first, rows) = check(parts)?;
        let activations = ActivationPrecision::common(parts)?;
        let stack: Vec<_> = parts.iter().map(|p| (p.format(), p.rows())).collect();
        let Some(groups) = arrange(&stack) else { return self.prepare_mixed(kernels, parts) };
        let (pieces, bytes) = place(&groups, first.cols());
        let memory = Memory::new(&self.context, "weights", bytes)?;
        self.with_state(|state| {
            state.stream.fill(memory.address, 0, memory.bytes)?;
            for (group, piece) in groups.iter().zip(&pieces) {
                let address = memory.address + piece.at as u64;
                let members: Vec<_> = group.members.iter().map(|&i| parts[i]).collect();
                let mut row = 0;
                for part in &members {
                    state.pack_part(kernels, &piece.layout, address, part, row)?;
                    row += part.rows();
                }
                state.pack_scales(&piece.layout, address, &members)?;
            }
            state.stream.synchronize()
        })?;
        Ok(CudaWeight::new(memory, pieces, (rows, first.cols()), first.format(), activations))
    }

    fn with_state<R>(&self, work: impl FnOnce(&mut State) -> Result<R>) -> Result<R> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.enter()?;
        match &mut *state {
            Some(state) => work(state),
            empty => work(empty.insert(State::new(&self.context)?)),
        }
    }

    /// A weight of random codes whose products with inputs of unit variance have about unit variance.
    pub(super) fn synthesize(&self, kernels: &Kernels, sms: usize, parts: &[Synthetic]) -> Result<CudaWeight> {
        let shape = |what, expected: String, got: String| Error::Shape { op: "synthesize", what, expected, got };
        let first = *parts.first().ok_or_else(|| shape("number of parts", "at least 1".into(), "0".into()))?;
        for part in parts {
            part.activations.check(part.format)?;
            if (part.cols, part.activations) != (first.cols, first.activations) {
                return Err(shape("a part", format!("{first:?}"), format!("{part:?}")));
            }
        }
        let stack: Vec<_> = parts.iter().map(|p| (p.format, p.rows)).collect();
        let groups = arrange(&stack).ok_or_else(|| Error::Unsupported {
            op: "random weights".to_owned(),
            need: "formats that alternate regularly".to_owned(),
            have: format!("{stack:?}"),
        })?;
        let (pieces, bytes) = place(&groups, first.cols);
        let memory = Memory::new(&self.context, "random weights", bytes)?;
        self.with_state(|state| {
            for piece in &pieces {
                state.fill_random(kernels, sms, &piece.layout, memory.address + piece.at as u64, first.seed)?;
            }
            state.stream.synchronize()
        })?;
        let rows = parts.iter().map(|p| p.rows).sum();
        Ok(CudaWeight::new(memory, pieces, (rows, first.cols), first.format, first.activations))
    }

    /// Parts of different formats have no records in common: they are kept as f32 values in two bf16 terms.
    fn prepare_mixed(&self, kernels: &Kernels, parts: &[PackedRef<'_>]) -> Result<CudaWeight> {
        let plain = parts
            .iter()
            .map(|p| ninfer_quant::dequantize_ref(p).map_err(|e| Error::Corrupt { reason: format!("weight: {e}") }))
            .collect::<Result<Vec<_>>>()?;
        let plain = parts
            .iter()
            .zip(&plain)
            .map(|(p, values)| {
                let data = PackedData::Plain { dtype: DType::F32, bytes: bytemuck::cast_slice(values) };
                PackedRef::new(p.rows(), p.cols(), data)
            })
            .collect::<Result<Vec<_>>>()?;
        self.prepare(kernels, &plain)
    }
}

/// First part and number of rows of a stack whose parts fit together.
fn check<'a>(parts: &[PackedRef<'a>]) -> Result<(PackedRef<'a>, usize)> {
    let shape =
        |what, expected: String, got: usize| Err(Error::Shape { op: "prepare", what, expected, got: got.to_string() });
    let Some(first) = parts.first() else { return shape("number of parts", "at least 1".to_owned(), 0) };
    for part in parts {
        if part.cols() != first.cols() {
            return shape("columns of a part", first.cols().to_string(), part.cols());
        }
    }
    let rows = parts.iter().map(PackedRef::rows).sum();
    if i32::try_from(rows).is_err() || i32::try_from(first.cols()).is_err() {
        return shape("rows and columns", format!("at most {}", i32::MAX), rows);
    }
    Ok((*first, rows))
}

/// The parts of a stack that have one format, and how their rows lie among the others'.
struct Group {
    format: WeightFormat,
    members: Vec<usize>,
    rows: usize,
    first: usize,
    run: usize,
    stride: usize,
}

/// Groups parts by the format of their records; `None` where the rows of a group do not repeat regularly.
fn arrange(stack: &[(WeightFormat, usize)]) -> Option<Vec<Group>> {
    let of = |f| match f {
        WeightFormat::Fp8Tensor => WeightFormat::Fp8Row,
        f => f,
    };
    let mut groups: Vec<Group> = Vec::new();
    // Runs of adjacent rows of each group.
    let mut runs: Vec<Vec<(usize, usize)>> = Vec::new();
    let mut row = 0;
    for (i, &(format, rows)) in stack.iter().enumerate() {
        let format = of(format);
        let at = groups.iter().position(|g| g.format == format).unwrap_or_else(|| {
            groups.push(Group { format, members: Vec::new(), rows: 0, first: row, run: 0, stride: 0 });
            runs.push(Vec::new());
            groups.len() - 1
        });
        groups[at].members.push(i);
        groups[at].rows += rows;
        match runs[at].last_mut() {
            Some((start, len)) if *start + *len == row => *len += rows,
            _ => runs[at].push((row, rows)),
        }
        row += rows;
    }
    for (group, runs) in groups.iter_mut().zip(&runs) {
        group.run = runs.first()?.1;
        group.stride = runs.get(1).map_or(group.run, |second| second.0 - runs[0].0);
        let regular = runs.iter().enumerate().all(|(i, r)| *r == (group.first + i * group.stride, group.run));
        if !regular {
            return None;
        }
    }
    Some(groups)
}

/// Where the groups lie in the memory of a weight, and its bytes.
fn place(groups: &[Group], cols: usize) -> (Vec<Piece>, usize) {
    let mut at = 0;
    let pieces = groups
        .iter()
        .map(|g| {
            let layout = WeightLayout::new(g.format, g.rows, cols);
            let piece = Piece { layout, at, first: g.first, run: g.run, stride: g.stride };
            at = at.saturating_add(layout.bytes()).next_multiple_of(256);
            piece
        })
        .collect();
    (pieces, at)
}

/// The planes of a part, with the bytes of a row in each.
struct Planes<'a> {
    kernel: &'static str,
    kind: i32,
    codes: (&'a [u8], usize),
    high: (&'a [u8], usize),
    scales: (&'a [u8], usize),
}

impl<'a> Planes<'a> {
    fn of(part: &PackedRef<'a>) -> Result<Self> {
        let cols = part.cols();
        let none: (&[u8], usize) = (&[], 0);
        Ok(match part.data() {
            PackedData::Plain { dtype, bytes } => Self {
                kernel: "pack_plain",
                kind: match dtype {
                    DType::F32 => 0,
                    DType::F16 => 1,
                    _ => 2,
                },
                codes: (bytes, cols * dtype.size()),
                high: none,
                scales: none,
            },
            PackedData::Fp8 { codes, .. } => {
                Self { kernel: "pack_fp8", kind: 0, codes: (codes, cols), high: none, scales: none }
            }
            PackedData::Nvfp4 { codes, scales, .. } => Self {
                kernel: "pack_nvfp4",
                kind: 0,
                codes: (codes, cols / 2),
                high: none,
                scales: (scales, cols / NVFP4_GROUP),
            },
            PackedData::Group { format, base, high, scales } => {
                use ninfer_core::format::GroupFormat as G;
                let groups = cols.next_multiple_of(GROUP_PAD) / format.group_size();
                Self {
                    kernel: match format {
                        G::Q4 => "pack_q4",
                        G::Q5 => "pack_q5",
                        G::Q6 => "pack_q6",
                        G::W8 => "pack_w8",
                    },
                    kind: 0,
                    codes: (base, groups * 32),
                    high: (high, groups * format.high_bytes()),
                    scales: (scales, groups * 2),
                }
            }
            other => {
                return Err(Error::Unsupported {
                    op: "CUDA weight".to_owned(),
                    need: "plain, FP8, NVFP4 or groupwise data".to_owned(),
                    have: format!("{other:?}").chars().take(40).collect(),
                });
            }
        })
    }

    fn row_bytes(&self) -> usize {
        self.codes.1 + self.high.1 + self.scales.1
    }
}

impl State {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let stage = || -> Result<Stage> {
            Ok(Stage {
                host: Pinned::new(context, PIECE)?,
                device: Memory::new(context, "weight staging", PIECE)?,
                used: Event::new(context)?,
            })
        };
        Ok(Self { stream: Stream::new(context)?, stages: [stage()?, stage()?], next: 0 })
    }

    /// A stage whose previous content has been read.
    fn stage(&mut self) -> Result<(&Stream, &mut Stage)> {
        let stage = &mut self.stages[self.next];
        self.next = 1 - self.next;
        stage.used.wait()?;
        Ok((&self.stream, stage))
    }

    fn pack_part(
        &mut self,
        kernels: &Kernels,
        layout: &WeightLayout,
        address: u64,
        part: &PackedRef<'_>,
        row: usize,
    ) -> Result<()> {
        if part.rows() == 0 || part.cols() == 0 {
            return Ok(());
        }
        let planes = Planes::of(part)?;
        // Three planes, each aligned.
        let fit = (PIECE - 3 * 256) / planes.row_bytes().max(1);
        let step = fit.min(GRID_ROWS);
        if step == 0 {
            return Err(Error::Unsupported {
                op: "CUDA weight".to_owned(),
                need: format!("rows of at most {} bytes", PIECE - 3 * 256),
                have: planes.row_bytes().to_string(),
            });
        }
        let function = kernels.get("pack", planes.kernel, 0)?;
        let threads = (4 * part.cols().div_ceil(RECORD_COLUMNS)) as u32;
        let mut from = 0;
        while from < part.rows() {
            let rows = step.min(part.rows() - from);
            let (stream, stage) = self.stage()?;
            let mut at = 0;
            let mut addresses = [0u64; 3];
            for (plane, address) in [planes.codes, planes.high, planes.scales].into_iter().zip(&mut addresses) {
                let bytes = &plane.0[from * plane.1..(from + rows) * plane.1];
                stage.host.bytes_mut()[at..at + bytes.len()].copy_from_slice(bytes);
                *address = stage.device.address + at as u64;
                at = (at + bytes.len()).next_multiple_of(256);
            }
            stream.upload(stage.device.address, &stage.host, 0, at.min(PIECE))?;
            let arguments = PackArg {
                to: WeightArg::new(layout, address),
                codes: addresses[0],
                high: addresses[1],
                scales: addresses[2],
                rows: rows as i32,
                row: (row + from) as i32,
                kind: planes.kind,
                unused: 0,
            };
            let how = Launch { grid: [threads.div_ceil(BLOCK), rows as u32, 1], block: BLOCK, shared: 0 };
            // SAFETY: the struct is the kernel's parameter; the planes hold `rows` rows and the records all rows of the stack.
            unsafe { stream.launch(&function, &how, &arguments)? };
            stream.record(&stage.used)?;
            from += rows;
        }
        Ok(())
    }

    /// Random codes with scales for inputs and results of unit variance.
    fn fill_random(
        &mut self,
        kernels: &Kernels,
        sms: usize,
        layout: &WeightLayout,
        address: u64,
        seed: u64,
    ) -> Result<()> {
        let unit = 1.0 / (layout.cols.max(1) as f32).sqrt();
        let uniform = 3f32.sqrt() * unit;
        // Deviations of uniform codes: E2M1 about 2.9, E4M3 without the upper half of its exponents about 0.6.
        let (scale, row_scale) = match layout.format {
            RecordFormat::Bf16 => (uniform, 1.0),
            RecordFormat::Fp8 => (0.0, unit / 0.6),
            RecordFormat::Nvfp4 => (0.0, unit / 2.9),
            RecordFormat::Q4 => (uniform / 8.0, 1.0),
            RecordFormat::Q5 => (uniform / 16.0, 1.0),
            RecordFormat::Q6 => (uniform / 32.0, 1.0),
            RecordFormat::W8 => (uniform / 128.0, 1.0),
        };
        let arguments = FillArg {
            to: WeightArg::new(layout, address),
            seed,
            records: (layout.row_blocks() * layout.blocks()) as i64,
            scale,
            unused: 0,
        };
        let function = kernels.get("pack", "fill_records", 0)?;
        let how = Launch { grid: [8 * sms.max(1) as u32, 1, 1], block: 256, shared: 0 };
        // SAFETY: the struct is the kernel's parameter, and the memory holds that many records.
        unsafe { self.stream.launch(&function, &how, &arguments)? };
        if layout.row_scales {
            let scales = vec![row_scale; layout.row_blocks() * ROW_BLOCK];
            self.copy(address + layout.row_scale_at() as u64, bytemuck::cast_slice(&scales))?;
        }
        if layout.block_scales {
            let scales = vec![row_scale; layout.block_scale_count()];
            self.copy(address + layout.block_scale_at() as u64, bytemuck::cast_slice(&scales))?;
        }
        Ok(())
    }

    /// Row and block scales of all parts.
    fn pack_scales(&mut self, layout: &WeightLayout, address: u64, parts: &[PackedRef<'_>]) -> Result<()> {
        let rows = layout.row_blocks() * ROW_BLOCK;
        if layout.row_scales {
            let mut scales = vec![0f32; rows];
            let mut row = 0;
            for part in parts {
                let to = &mut scales[row..row + part.rows()];
                match part.data() {
                    PackedData::Fp8 { scales: Fp8Scales::Tensor(s), .. } => to.fill(s),
                    PackedData::Fp8 { scales: Fp8Scales::Row(s), .. } => to.copy_from_slice(s),
                    PackedData::Nvfp4 { global, .. } => to.fill(match global {
                        GlobalScale::Divide(g) => 1.0 / g,
                        GlobalScale::Multiply(g) => g,
                    }),
                    _ => {}
                }
                row += part.rows();
            }
            self.copy(address + layout.row_scale_at() as u64, bytemuck::cast_slice(&scales))?;
        }
        if layout.block_scales {
            let blocks = layout.cols.div_ceil(FP8_BLOCK);
            let mut scales = vec![0f32; layout.block_scale_count()];
            let mut row = 0;
            for part in parts {
                if let PackedData::Fp8 { scales: Fp8Scales::Block(s), .. } = part.data() {
                    for r in 0..part.rows() {
                        for b in 0..blocks {
                            let to = ((row + r) / ROW_BLOCK * blocks + b) * ROW_BLOCK + (row + r) % ROW_BLOCK;
                            scales[to] = s[r / FP8_BLOCK * blocks + b];
                        }
                    }
                }
                row += part.rows();
            }
            self.copy(address + layout.block_scale_at() as u64, bytemuck::cast_slice(&scales))?;
        }
        Ok(())
    }

    fn copy(&mut self, to: u64, bytes: &[u8]) -> Result<()> {
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let (stream, stage) = self.stage()?;
            stage.host.bytes_mut()[..piece.len()].copy_from_slice(piece);
            stream.upload(to + (i * PIECE) as u64, &stage.host, 0, piece.len())?;
            stream.record(&stage.used)?;
        }
        Ok(())
    }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] =
    &[("pack_", size_of::<PackArg>()), ("fill_records", size_of::<FillArg>())];

#[cfg(test)]
mod tests {
    use ninfer_core::format::GroupFormat;

    use super::*;

    #[test]
    fn formats_that_alternate_become_two_pieces() {
        let (q4, q5) = (WeightFormat::Group(GroupFormat::Q4), WeightFormat::Group(GroupFormat::Q5));
        let groups = arrange(&[(q4, 8), (q5, 4), (q4, 8), (q5, 4)]).unwrap();
        let seen: Vec<_> = groups.iter().map(|g| (g.format, g.rows, g.first, g.run, g.stride)).collect();
        assert_eq!(seen, [(q4, 16, 0, 8, 12), (q5, 8, 8, 4, 12)]);
        let (pieces, bytes) = place(&groups, 128);
        assert_eq!(pieces[1].at % 256, 0);
        assert!(bytes >= 2 * 544 + 2 * 672);
        assert!(arrange(&[(q4, 8), (q5, 4), (q4, 7), (q5, 4)]).is_none());
        let tensor = arrange(&[(WeightFormat::Fp8Tensor, 8), (WeightFormat::Fp8Row, 8)]).unwrap();
        assert_eq!((tensor.len(), tensor[0].rows, tensor[0].run), (1, 16, 16));
    }
}
