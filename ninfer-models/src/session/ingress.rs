//! Small inputs of a pass, gathered on the host and uploaded in one piece.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::segment::{SEGMENT_WORDS, Segment};
use ninfer_core::view::View;
use ninfer_core::{DType, Error, Result};

/// One device buffer of 32-bit words and its host copy.
///
/// Offsets depend only on what is put in which order, so a recorded step finds its inputs at the same places every time.
pub(crate) struct Ingress<B: InferenceBackend> {
    words: Vec<i32>,
    buffer: B::Buffer,
    capacity: usize,
}

impl<B: InferenceBackend> Ingress<B> {
    pub(crate) fn alloc(backend: &B, capacity: usize) -> Result<Self> {
        Ok(Self { words: Vec::with_capacity(capacity), buffer: backend.alloc("inputs", capacity * 4)?, capacity })
    }

    /// Forgets the inputs of the pass before.
    pub(crate) fn clear(&mut self) {
        self.words.clear();
    }

    /// Appends words as a `[rows, cols]` view.
    fn put(&mut self, dtype: DType, cols: usize, words: impl Iterator<Item = i32>) -> Result<View<B>> {
        let at = self.words.len();
        self.words.extend(words);
        if self.words.len() > self.capacity {
            return Err(Error::Shape {
                op: "session",
                what: "inputs of a pass",
                expected: format!("at most {} words", self.capacity),
                got: self.words.len().to_string(),
            });
        }
        View::new(self.buffer.clone(), dtype, at * 4, (self.words.len() - at) / cols.max(1), cols)
    }

    /// Appends token ids, U32 `[n, 1]`.
    pub(crate) fn ids(&mut self, ids: impl Iterator<Item = u32>) -> Result<View<B>> {
        self.put(DType::U32, 1, ids.map(u32::cast_signed))
    }

    /// Appends indices, I32 `[n, 1]`; `None` is −1.
    pub(crate) fn indices(&mut self, indices: impl Iterator<Item = Option<usize>>) -> Result<View<B>> {
        self.put(DType::I32, 1, indices.map(|i| i.and_then(|i| i32::try_from(i).ok()).unwrap_or(-1)))
    }

    /// Appends a segment table, I32 `[n, 8]`.
    pub(crate) fn table(&mut self, segments: impl Iterator<Item = Segment>) -> Result<View<B>> {
        self.put(DType::I32, SEGMENT_WORDS, segments.flat_map(Segment::to_words))
    }

    /// Uploads everything that was put since [`Ingress::clear`].
    pub(crate) fn send(&self, backend: &B, queue: &mut B::Queue) -> Result<()> {
        let view = View::new(self.buffer.clone(), DType::I32, 0, 1, self.words.len())?;
        backend.upload(queue, &view, bytemuck::cast_slice(&self.words))
    }
}
