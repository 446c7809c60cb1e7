//! Gated full attention over paged keys and values.

use ninfer_core::capability::Target;
use ninfer_core::memory::KvFormat;
use ninfer_core::ops::{Attend, AttentionOps, KvLayer, RopeAppend};
use ninfer_core::segment::{Batch, MAX_STEP_ROWS, PAGE_TOKENS, Profile};
use ninfer_core::view::View;
use ninfer_core::{DType, Error, Result};

use super::Cuda;
use super::batch::BatchArg;
use super::buffer::Matrix;
use super::driver::Launch;
use super::queue::CudaQueue;

const FAMILY: &str = "attention";
/// Pages of a leaf of keys.
const LEAF_PAGES: usize = 4;
/// `kSplitPages` of `common/attend.cuh`.
const SPLIT_PAGES: usize = 6;
/// Threads of a block that works on tiles of a step.
const TILE_BLOCK: u32 = 256;
/// Threads of a block of `attend_any`.
const ANY_BLOCK: u32 = 128;
/// Features of a head for which there are tiles.
const HEAD: usize = 256;
/// Pages of a leaf of a prompt: `kPromptLeaf` of `common/attend_prompt.cuh`.
const PROMPT_LEAF_PAGES: usize = 64;
/// Warps of a block of a prompt, each with 16 rows.
const PROMPT_WARPS: std::ops::RangeInclusive<usize> = 4..=8;
/// Most bytes of partial results for which the leaves of a prompt are dealt out to several blocks.
const MOST_JOINED: usize = 256 << 20;
/// Heads that a block of `rope_append` takes.
const UNITS: usize = 4;
/// Most pages whose copies are under way in a block.
const MOST_STAGES: usize = 3;
/// Shared memory that the system takes for each block.
const RESERVED: usize = 1 << 10;

/// `Kv` of `common/kv.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct KvArg {
    keys: Matrix,
    values: Matrix,
    key_scales: Matrix,
    value_scales: Matrix,
    table: Matrix,
    slots: i32,
    per_sequence: i32,
    heads: i32,
    pages: i32,
    format: i32,
    unused: i32,
}

/// `RopeAppend` of `attention.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RopeAppendArg {
    batch: BatchArg,
    kv: KvArg,
    query_gate: Matrix,
    key: Matrix,
    value: Matrix,
    query: Matrix,
    gains: Matrix,
    frequencies: u64,
    report: u64,
    eps: f32,
    magnitude: f32,
    shift: i32,
    heads: i32,
    d: i32,
    half: i32,
}

/// `Attend` of `common/attend.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AttendArg {
    batch: BatchArg,
    kv: KvArg,
    query: Matrix,
    query_gate: Matrix,
    output: Matrix,
    leaf_sums: u64,
    leaf_output: u64,
    page_sums: u64,
    page_output: u64,
    report: u64,
    heads: i32,
    group: i32,
    head_dim: i32,
    first_key: i32,
    leaves: i32,
    blocks: i32,
    tile_rows: i32,
    scale: f32,
    stages: i32,
    splits: i32,
}

impl KvArg {
    fn new(op: &'static str, kv: &KvLayer<Cuda>) -> Result<Self> {
        let format = match kv.keys.dtype() {
            DType::Bf16 => 0,
            DType::I8 => 1,
            DType::F8E4M3 => 2,
            got => return Err(Error::WrongDType { op, what: "keys", expected: DType::Bf16, got }),
        };
        let bytes = |view: &View<Cuda>| {
            let m = Matrix::from(view);
            Matrix::at(m.address(), m.stride() * view.dtype().size())
        };
        let [key_scales, value_scales] =
            kv.scales.as_ref().map_or([Matrix::NONE; 2], |s| [Matrix::from(&s.keys), Matrix::from(&s.values)]);
        Ok(Self {
            keys: bytes(&kv.keys),
            values: bytes(&kv.values),
            key_scales,
            value_scales,
            table: (&kv.pages).into(),
            slots: kv.pages.rows() as i32,
            per_sequence: kv.pages.cols() as i32,
            heads: kv.heads as i32,
            pages: (kv.keys.rows() / (kv.heads * PAGE_TOKENS)) as i32,
            format,
            unused: 0,
        })
    }
}

fn check_segments(op: &'static str, batch: &Batch<Cuda>) -> Result<()> {
    if batch.segments <= MAX_STEP_ROWS {
        return Ok(());
    }
    let expected = format!("at most {MAX_STEP_ROWS}");
    Err(Error::Shape { op, what: "segments", expected, got: batch.segments.to_string() })
}

/// Kernels for one format and head size.
#[derive(Clone, Copy)]
struct Names {
    format: KvFormat,
    family: &'static str,
    /// For tiles of 16 and 32 rows.
    step: [&'static str; 2],
    /// For tiles of 32 and 64 rows.
    prefill: [Option<&'static str>; 2],
    /// For blocks with much shared memory.
    prompt: &'static str,
}

/// The kernels that work on tiles, where there are some.
fn names(format: KvFormat, d: usize) -> Option<Names> {
    macro_rules! table {
        ($($format:ident $text:literal $small:expr),+) => {
            match format {
                $(KvFormat::$format => Names {
                    format,
                    family: concat!("attention_", $text, "_256"),
                    step: [concat!("attend_step_", $text, "_256_16"), concat!("attend_step_", $text, "_256_32")],
                    prefill: [$small, Some(concat!("attend_prefill_", $text, "_256_64"))],
                    prompt: concat!("attend_prompt_", $text, "_256"),
                },)+
                _ => return None,
            }
        };
    }
    let names = table!(Bf16 "bf16" Some("attend_prefill_bf16_256_32"), Int8G64 "i8" None, Fp8 "fp8" None);
    (d == HEAD).then_some(names)
}

/// Whether rows begin at multiples of 16 bytes.
fn aligned(view: &View<Cuda>) -> bool {
    let m = Matrix::from(view);
    m.address().is_multiple_of(16) && (m.stride() * view.dtype().size()).is_multiple_of(16)
}

/// The kernels that work on tiles, if the layout suits them.
fn tiled(op: &Attend<Cuda>) -> Option<Names> {
    let names = names(KvFormat::of(op.kv.keys.dtype())?, op.kv.keys.cols())?;
    let rows = [&op.query, &op.query_gate, &op.output, &op.kv.keys, &op.kv.values];
    let scales = op.kv.scales.iter().flat_map(|s| [&s.keys, &s.values]);
    let dense = |view: &View<Cuda>| view.is_contiguous() && Matrix::from(view).address().is_multiple_of(16);
    (rows.into_iter().all(aligned) && scales.into_iter().all(dense)).then_some(names)
}

/// How the blocks of a kernel share an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Residency {
    /// Pages whose copies are under way in a block.
    stages: usize,
    /// Blocks of an SM.
    blocks: usize,
    /// Shared memory of a block.
    shared: usize,
}

impl Residency {
    /// The choice that keeps most pages under way; of equal ones that with most blocks. `None` if no page fits.
    fn choose(sm: usize, block: usize, side: usize, page: usize, most_blocks: usize) -> Option<Self> {
        let of = |blocks: usize| {
            let room = (sm / blocks).checked_sub(RESERVED)?.min(block).checked_sub(side)?;
            let stages = (room / page).min(MOST_STAGES);
            (stages > 0).then_some(Self { stages, blocks, shared: side + stages * page })
        };
        (1..=most_blocks).filter_map(of).max_by_key(|r| (r.stages * r.blocks, r.blocks))
    }

    /// For tiles of `16 · m` rows of `d` features.
    fn of(backend: &Cuda, format: KvFormat, d: usize, m: usize) -> Option<Self> {
        let device = &backend.0.device;
        // Registers leave room for so many blocks.
        let most = if m == 1 { 2 } else { 1 };
        let page = 2 * PAGE_TOKENS * (d * format.dtype().size() + 2 * format.scale_groups(d));
        Self::choose(
            device.shared_per_sm as usize,
            device.shared_per_block_optin as usize,
            side_bytes(d, m),
            page,
            most,
        )
    }
}

/// Bytes of `Side` of `common/attend_tile.cuh`.
fn side_bytes(d: usize, m: usize) -> usize {
    m * (32 * d + 2048 + 1024 + 128) + 528
}

/// Bytes of partial results of pages whose leaf is cut; an upper estimate.
pub(super) fn split_bytes(backend: &Cuda, head_dim: usize) -> usize {
    backend.sms() * 4 * SPLIT_PAGES * 32 * (head_dim + 2) * 4
}

/// How the rows of a prompt are dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Deal {
    /// Warps of a block.
    warps: usize,
    /// Tiles of the call at most.
    tiles: usize,
    /// Blocks that share the leaves of a tile.
    splits: usize,
    /// Places for partial results of a row and head.
    places: usize,
}

impl Deal {
    /// For `pairs` of rows and query heads of one of `heads` KV heads, in `segments`, with `pages` of a sequence at most: the
    /// height of tiles with which the device is done first, as far as shapes tell.
    fn choose(sms: usize, pairs: usize, segments: usize, heads: usize, pages: usize) -> Self {
        let tiles = |warps: usize| pairs / (16 * warps) + segments;
        // A page costs a block what its warps multiply, and a part that they share.
        let cost = |warps: usize| (pairs.div_ceil(16 * warps) * heads).div_ceil(sms) * (warps + 1);
        let warps = PROMPT_WARPS.min_by_key(|&w| (cost(w), usize::MAX - w)).unwrap_or(*PROMPT_WARPS.end());
        let leaves = pages.div_ceil(PROMPT_LEAF_PAGES).max(1);
        let blocks = pairs.div_ceil(16 * warps) * heads;
        let bytes = pairs * heads * leaves * (HEAD + 2) * 4;
        let splits = if bytes <= MOST_JOINED { (sms / blocks.max(1)).clamp(1, leaves) } else { 1 };
        Self { warps, tiles: tiles(warps), splits, places: if splits > 1 { leaves } else { 1 } }
    }
}

/// Shared memory of a block of a prompt: `kQueriesAt` of `common/attend_prompt.cuh` and the queries.
fn prompt_bytes(format: KvFormat, warps: usize) -> usize {
    let half = PAGE_TOKENS * HEAD * 2;
    let (codes, scales) = match format {
        KvFormat::Bf16 => (0, 0),
        _ => (2 * PAGE_TOKENS * HEAD, 4 * PAGE_TOKENS * format.scale_groups(HEAD)),
    };
    4 * half + codes + 2 * scales + 128 + warps * 16 * HEAD * 2
}

impl AttendArg {
    fn new(queue: &CudaQueue, op: &Attend<Cuda>) -> Result<Self> {
        let d = op.kv.keys.cols();
        let heads = op.query.cols() / d;
        Ok(Self {
            batch: (&op.batch).into(),
            kv: KvArg::new("attend", &op.kv)?,
            query: (&op.query).into(),
            query_gate: (&op.query_gate).into(),
            output: (&op.output).into(),
            leaf_sums: 0,
            leaf_output: 0,
            page_sums: 0,
            page_output: 0,
            report: queue.report_address(),
            heads: heads as i32,
            group: (heads / op.kv.heads) as i32,
            head_dim: d as i32,
            first_key: i32::try_from(op.first_key).unwrap_or(i32::MAX),
            leaves: op.kv.pages.cols().div_ceil(LEAF_PAGES) as i32,
            blocks: 1,
            tile_rows: 16,
            scale: std::f32::consts::LOG2_E / (d as f32).sqrt(),
            stages: 1,
            splits: 1,
        })
    }

    fn step(
        self,
        backend: &Cuda,
        queue: &mut CudaQueue,
        op: &Attend<Cuda>,
        names: &Names,
        m: usize,
        r: Residency,
    ) -> Result<()> {
        let (t, d, heads) = (op.batch.rows, op.kv.keys.cols(), self.heads as usize);
        let tile_rows = 16 * m;
        // No more blocks than there can be pages.
        let tiles = (t * self.group as usize).div_ceil(tile_rows) + op.batch.segments;
        let most = tiles.saturating_mul(op.kv.heads).saturating_mul(op.kv.pages.cols());
        let blocks = (backend.sms() * r.blocks).clamp(1, most.max(1));
        let (leaves, pages) = (t * heads * self.leaves as usize, blocks * SPLIT_PAGES * tile_rows);
        let [leaf_sums, leaf_output, page_sums, page_output] =
            queue.scratch([leaves * 8, leaves * d * 4, pages * 8, pages * d * 4])?;
        let (workgroups, stages) = (blocks as i32, r.stages as i32);
        let arguments = Self { leaf_sums, leaf_output, page_sums, page_output, blocks: workgroups, stages, ..self };
        let arguments = Self { tile_rows: tile_rows as i32, ..arguments };
        let how = Launch { grid: [blocks as u32, 1, 1], block: TILE_BLOCK, shared: r.shared as u32 };
        // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, pages are by the kernel, and the
        // workspace holds a partial result for each leaf of each row, and for each page that a block may have to cut off.
        unsafe { queue.launch(backend, names.family, names.step[m - 1], how, &arguments)? };
        let how = Launch { grid: [(t * heads) as u32, (d / 32) as u32, 1], block: 256, shared: 0 };
        // SAFETY: as above.
        unsafe { queue.launch(backend, FAMILY, "attend_combine", how, &arguments) }
    }

    fn prefill(
        self,
        backend: &Cuda,
        queue: &mut CudaQueue,
        op: &Attend<Cuda>,
        (family, name): (&'static str, &'static str),
        m: usize,
        r: Residency,
    ) -> Result<()> {
        let arguments = Self { tile_rows: 16 * m as i32, stages: r.stages as i32, ..self };
        let tiles = op.batch.rows * self.group as usize / (16 * m) + op.batch.segments;
        let grid = [tiles as u32, op.kv.heads as u32, 1];
        let how = Launch { grid, block: TILE_BLOCK, shared: r.shared as u32 };
        // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, pages are by the kernel.
        unsafe { queue.launch(backend, family, name, how, &arguments) }
    }
}

impl AttendArg {
    /// The route of prompts on devices whose blocks may have much shared memory.
    fn prompt(self, backend: &Cuda, queue: &mut CudaQueue, op: &Attend<Cuda>, names: &Names, deal: Deal) -> Result<()> {
        let (t, d, heads) = (op.batch.rows, op.kv.keys.cols(), self.heads as usize);
        let rows = t * heads * deal.places;
        let [leaf_sums, leaf_output] = queue.scratch([rows * 8, rows * d * 4])?;
        let (leaves, splits, tile_rows) = (deal.places as i32, deal.splits as i32, 16 * deal.warps as i32);
        let arguments = Self { leaf_sums, leaf_output, leaves, splits, tile_rows, ..self };
        let how = Launch {
            grid: [deal.tiles as u32, op.kv.heads as u32, deal.splits as u32],
            block: 32 * deal.warps as u32,
            shared: prompt_bytes(names.format, deal.warps) as u32,
        };
        // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, pages are by the kernel, and the
        // workspace holds a partial result of each row and head, or where leaves are dealt out one for each leaf.
        unsafe { queue.launch(backend, names.family, names.prompt, how, &arguments)? };
        if deal.splits == 1 {
            return Ok(());
        }
        let how = Launch { grid: [(t * heads).div_ceil(8) as u32, 1, 1], block: 256, shared: 0 };
        // SAFETY: as above.
        unsafe { queue.launch(backend, FAMILY, "attend_join", how, &arguments) }
    }
}

impl AttentionOps for Cuda {
    fn rope_append(&self, queue: &mut CudaQueue, op: RopeAppend<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            check_segments("rope_append", &op.batch)?;
            let (d, half) = (op.gains.cols(), op.rope.frequencies.cols());
            let heads = op.query.cols() / d;
            let arguments = RopeAppendArg {
                batch: (&op.batch).into(),
                kv: KvArg::new("rope_append", &op.kv)?,
                query_gate: (&op.query_gate).into(),
                key: (&op.key).into(),
                value: (&op.value).into(),
                query: (&op.query).into(),
                gains: (&op.gains).into(),
                frequencies: Matrix::from(&op.rope.frequencies).address(),
                report: queue.report_address(),
                eps: op.eps,
                magnitude: op.rope.magnitude,
                shift: i32::try_from(op.rope.shift).unwrap_or(i32::MAX),
                heads: heads as i32,
                d: d as i32,
                half: half as i32,
            };
            let units = heads + 2 * op.kv.heads;
            let how = Launch {
                grid: [op.batch.rows as u32, units.div_ceil(UNITS) as u32, 1],
                block: 32 * UNITS as u32,
                shared: (4 * (2 * half + UNITS * d)) as u32,
            };
            // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, pages are by the kernel.
            unsafe { queue.launch(self, FAMILY, "rope_append", how, &arguments) }
        })
    }

    fn attend(&self, queue: &mut CudaQueue, op: Attend<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            check_segments("attend", &op.batch)?;
            let arguments = AttendArg::new(queue, op)?;
            let (t, d, group) = (op.batch.rows, op.kv.keys.cols(), arguments.group as usize);
            // All tile heights of a profile give the same bits. A step takes the one that holds an even share of its rows.
            let even = t.div_ceil(op.batch.segments.max(1)) * group;
            let heights: &[usize] = match op.batch.profile {
                Profile::Step if even <= 16 => &[1],
                Profile::Step => &[2, 1],
                Profile::Prefill => &[4, 2],
            };
            if let (Profile::Prefill, Some(names)) = (op.batch.profile, tiled(op)) {
                let most = prompt_bytes(names.format, *PROMPT_WARPS.end());
                let device = &self.0.device;
                if self.kernels().selection().targets.contains(&Target::Sm90)
                    && most <= device.shared_per_block_optin as usize
                {
                    let pages = op.kv.pages.cols();
                    let deal = Deal::choose(self.sms(), t * group, op.batch.segments, op.kv.heads, pages);
                    return arguments.prompt(self, queue, op, &names, deal);
                }
            }
            for (names, &m) in tiled(op).iter().flat_map(|names| heights.iter().map(move |m| (names, m))) {
                let Some(residency) = Residency::of(self, names.format, d, m) else { continue };
                if op.batch.profile == Profile::Step {
                    return arguments.step(self, queue, op, names, m, residency);
                }
                if let Some(name) = names.prefill[m / 4] {
                    return arguments.prefill(self, queue, op, (names.family, name), m, residency);
                }
            }
            let how = Launch {
                grid: [t as u32, arguments.heads as u32, 1],
                block: ANY_BLOCK,
                shared: (4 * (2 * d + PAGE_TOKENS)) as u32,
            };
            // SAFETY: as above.
            unsafe { queue.launch(self, FAMILY, "attend_any", how, &arguments) }
        })
    }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] =
    &[("rope_append", size_of::<RopeAppendArg>()), ("attend_", size_of::<AttendArg>())];

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages under way on an H200 (228 KiB an SM, 227 KiB a block) and on an RTX 5090 (100 and 99 KiB).
    #[test]
    fn residency_follows_shared_memory() {
        let choose = |sm: usize, format: KvFormat, m: usize, most: usize| {
            let page = 2 * PAGE_TOKENS * (256 * format.dtype().size() + 2 * format.scale_groups(256));
            Residency::choose(sm << 10, (sm - 1) << 10, side_bytes(256, m), page, most).map(|r| (r.blocks, r.stages))
        };
        assert_eq!(choose(228, KvFormat::Int8G64, 1, 2), Some((2, 3)));
        assert_eq!(choose(228, KvFormat::Int8G64, 2, 1), Some((1, 3)));
        assert_eq!(choose(228, KvFormat::Bf16, 1, 2), Some((1, 3)));
        assert_eq!(choose(228, KvFormat::Bf16, 2, 1), Some((1, 3)));
        assert_eq!(choose(100, KvFormat::Int8G64, 1, 2), Some((2, 1)));
        assert_eq!(choose(100, KvFormat::Int8G64, 4, 1), Some((1, 1)));
        assert_eq!(choose(100, KvFormat::Bf16, 2, 1), Some((1, 1)));
        assert_eq!(choose(100, KvFormat::Bf16, 4, 1), None);
    }

    #[test]
    fn prompts_are_dealt_out() {
        // (pairs, KV heads, pages) to (warps, splits) with 132 multiprocessors.
        let choose = |pairs: usize, heads: usize, pages: usize| {
            let deal = Deal::choose(132, pairs, 1, heads, pages);
            assert!(deal.tiles * 16 * deal.warps >= pairs && deal.splits <= deal.places.max(1));
            (deal.warps, deal.splits)
        };
        // 1,024 tokens with 8 and with 6 query heads of a KV head: as many tiles as multiprocessors, or twice as many.
        assert_eq!(choose(8192, 2, 1024), (8, 1));
        assert_eq!(choose(6144, 4, 1024), (6, 1));
        // A few tokens of a long context.
        let few = choose(512, 2, 1024);
        assert!(few.1 >= 8, "{few:?}");
        assert_eq!(choose(512, 2, 64).1, 1);
        for format in [KvFormat::Bf16, KvFormat::Int8G64, KvFormat::Fp8] {
            assert!(prompt_bytes(format, 8) <= 227 << 10);
        }
    }
}
