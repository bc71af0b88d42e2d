//! A device without arithmetic, for testing schedulers and engines: it stores token ids in paged blocks as a
//! real one stores keys and values, and "predicts" by hashing all tokens it can see through the block tables.
//!
//! Its answer for a row depends on every token of the row's sequence and their order, so a wrong table,
//! position, copy, reused block or stale prefix changes the reply or is caught outright: every slot remembers
//! which token at which position it holds, in the context of which tokens before it, and a row may only read
//! slots written for exactly its own prefix.

use std::collections::HashMap;

use dynacore::{Error, Executor, Logits, Result, Ticket};
use dynair::{BatchMeta, BlockId, Limits};

/// One cache group of the scripted device.
#[derive(Debug, Clone, Copy)]
pub struct ScriptedGroup {
    /// Blocks in its pool.
    pub blocks: usize,
    /// Tokens its layers see; `None`: all.
    pub window: Option<u32>,
}

/// What a slot of a block holds: a token and the hash of all tokens up to and including it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    position: u32,
    token: u32,
    prefix: u64,
}

/// The scripted device. See the module's docs.
#[derive(Debug)]
pub struct ScriptedExecutor {
    vocab: usize,
    block_tokens: usize,
    limits: Limits,
    groups: Vec<ScriptedGroup>,
    /// Per group and block: its slots.
    slots: Vec<Vec<Vec<Option<Slot>>>>,
    pending: HashMap<u64, Logits>,
    next_ticket: u64,
    end_token: Option<(u32, u64)>,
    /// Rows computed so far.
    pub rows: usize,
    /// Steps executed so far.
    pub steps: usize,
    /// Rows whose logits are NaN: those of sequences that start with this token.
    pub nan_for: Option<u32>,
}

/// Hash of the empty prefix.
const EMPTY: u64 = 0x9e37_79b9_7f4a_7c15;

/// Hash of a prefix one token longer.
fn extend(prefix: u64, token: u32) -> u64 {
    let mut x = prefix ^ u64::from(token).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

impl ScriptedExecutor {
    /// A device with a vocabulary of `vocab` tokens whose cache has these groups.
    pub fn new(vocab: usize, block_tokens: usize, limits: Limits, groups: Vec<ScriptedGroup>) -> Self {
        let slots = groups
            .iter()
            .map(|group| vec![vec![None; block_tokens]; group.blocks])
            .collect();
        ScriptedExecutor {
            vocab,
            block_tokens,
            limits,
            groups,
            slots,
            pending: HashMap::new(),
            next_ticket: 0,
            end_token: None,
            rows: 0,
            steps: 0,
            nan_for: None,
        }
    }

    /// Lets the model answer `token` where it would answer something else, at about one position in `one_in`.
    #[must_use]
    pub fn ending(mut self, token: u32, one_in: u64) -> Self {
        self.end_token = Some((token, one_in));
        self
    }

    /// What greedy decoding gives after `tokens`: the reference for every reply.
    pub fn next_token(&self, tokens: &[u32]) -> u32 {
        self.choose(tokens.iter().fold(EMPTY, |prefix, &token| extend(prefix, token)))
    }

    /// The first `count` tokens of the greedy reply to `prompt`.
    pub fn reply(&self, prompt: &[u32], count: usize) -> Vec<u32> {
        let mut prefix = prompt.iter().fold(EMPTY, |prefix, &token| extend(prefix, token));
        (0..count)
            .map(|_| {
                let token = self.choose(prefix);
                prefix = extend(prefix, token);
                token
            })
            .collect()
    }

    fn choose(&self, prefix: u64) -> u32 {
        if let Some((token, one_in)) = self.end_token
            && (prefix >> 7).is_multiple_of(one_in)
        {
            return token;
        }
        (prefix % self.vocab as u64) as u32
    }

    /// Logits after a prefix: the chosen token stands out, the others differ a little.
    fn logits(&self, prefix: u64) -> impl Iterator<Item = f32> + '_ {
        let best = self.choose(prefix) as usize;
        (0..self.vocab).map(move |i| {
            let noise = (extend(prefix, i as u32) >> 40) as f32 / (1u64 << 24) as f32;
            if i == best { 4.0 } else { noise }
        })
    }

    /// Forgets what blocks hold, as if another had used them: reading them is an error from now on.
    pub fn poison(&mut self, group: usize, block: BlockId) {
        self.slots[group][block.0 as usize].fill(None);
    }

    fn copy_blocks(&mut self, batch: &BatchMeta) -> Result<()> {
        for (g, table) in batch
            .tables
            .iter()
            .enumerate()
            .filter(|(_, table)| !table.copies.is_empty())
        {
            let count = self.groups[g].blocks as u32;
            let before = self.slots[g].clone();
            for &(from, to) in &table.copies {
                if from.0 >= count || to.0 >= count {
                    return refuse(format!(
                        "group {g}: copy {} to {} of {count} blocks",
                        from.0, to.0
                    ));
                }
                if table.copies.iter().any(|&(other, _)| other == to) {
                    return refuse(format!(
                        "group {g}: block {} is copied from and to in one step",
                        to.0
                    ));
                }
                self.slots[g][to.0 as usize] = before[from.0 as usize].clone();
            }
        }
        Ok(())
    }

    /// The slot of position `p` of sequence `s`.
    fn place(&self, batch: &BatchMeta, g: usize, s: usize, p: u32) -> Result<(usize, usize)> {
        let table = &batch.tables[g];
        let at = p
            .checked_sub(table.start[s])
            .map(|offset| offset as usize / self.block_tokens);
        let blocks = &table.blocks[table.first[s] as usize..table.first[s + 1] as usize];
        match at.and_then(|at| blocks.get(at)) {
            Some(block) if (block.0 as usize) < self.groups[g].blocks => {
                Ok((block.0 as usize, p as usize % self.block_tokens))
            }
            _ => refuse(format!("group {g}: position {p} of sequence {s} has no block")),
        }
    }

    /// Checks a batch's form against [`BatchMeta`]'s rules and the limits.
    fn validate(&self, batch: &BatchMeta) -> Result<()> {
        let (t, s) = (batch.tokens.len(), batch.seqs.len());
        if t == 0 || t > self.limits.max_tokens || s > self.limits.max_seqs {
            return refuse(format!("{t} tokens and {s} sequences, limits {:?}", self.limits));
        }
        if batch.output_rows.len() > self.limits.max_outputs || batch.positions.len() != t {
            return refuse(format!(
                "{} outputs, {} positions",
                batch.output_rows.len(),
                batch.positions.len()
            ));
        }
        let ascending = batch.output_rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || batch.output_rows.last().is_some_and(|&row| row as usize >= t) {
            return refuse(format!("output rows {:?} of {t}", batch.output_rows));
        }
        let mut row = 0;
        for span in &batch.seqs {
            if span.first_row != row || span.rows == 0 || span.context_len < span.rows {
                return refuse(format!("span {span:?} where row {row} was due"));
            }
            for i in 0..span.rows {
                let position = span.context_len - span.rows + i;
                if batch.positions.get((row + i) as usize) != Some(&position) {
                    return refuse(format!("row {} is not at position {position}", row + i));
                }
            }
            row += span.rows;
        }
        if row as usize != t || batch.tables.len() != self.groups.len() {
            return refuse(format!("{row} rows of {t}; {} tables", batch.tables.len()));
        }
        for (g, table) in batch.tables.iter().enumerate() {
            let form = table.first.len() == s + 1
                && table.start.len() == s
                && table.first[0] == 0
                && table.first[s] as usize == table.blocks.len()
                && table.first.windows(2).all(|pair| pair[0] <= pair[1])
                && table
                    .start
                    .iter()
                    .all(|&start| (start as usize).is_multiple_of(self.block_tokens));
            if !form {
                return refuse(format!("group {g}: malformed table {table:?}"));
            }
        }
        Ok(())
    }

    /// Writes the batch's tokens and gives the prefix hash of each row.
    fn write(&mut self, batch: &BatchMeta) -> Result<Vec<u64>> {
        let mut written: Vec<HashMap<(usize, usize), usize>> = vec![HashMap::new(); self.groups.len()];
        let mut hashes = Vec::with_capacity(batch.tokens.len());
        for (s, span) in batch.seqs.iter().enumerate() {
            let first = span.context_len - span.rows;
            let mut prefix = if first == 0 {
                EMPTY
            } else {
                self.stored(batch, 0, s, first - 1)?.prefix
            };
            for p in first..span.context_len {
                let token = batch.tokens[(span.first_row + p - first) as usize];
                prefix = extend(prefix, token);
                for (g, written) in written.iter_mut().enumerate() {
                    let place = self.place(batch, g, s, p)?;
                    if written.insert(place, s).is_some() {
                        return refuse(format!("group {g}: two tokens written to block {}", place.0));
                    }
                    self.slots[g][place.0][place.1] = Some(Slot {
                        position: p,
                        token,
                        prefix,
                    });
                }
                hashes.push(prefix);
            }
        }
        Ok(hashes)
    }

    fn stored(&self, batch: &BatchMeta, g: usize, s: usize, p: u32) -> Result<Slot> {
        let (block, slot) = self.place(batch, g, s, p)?;
        match self.slots[g][block][slot] {
            Some(found) if found.position == p => Ok(found),
            other => refuse(format!(
                "group {g}: sequence {s} reads position {p}, block {block} holds {other:?}"
            )),
        }
    }

    /// Checks that each sequence reads exactly its own prefix, as far as each group's window reaches.
    fn read(&self, batch: &BatchMeta, hashes: &[u64]) -> Result<()> {
        for (s, span) in batch.seqs.iter().enumerate() {
            let first = span.context_len - span.rows;
            for (g, group) in self.groups.iter().enumerate() {
                let from = group
                    .window
                    .map_or(0, |window| (first + 1).saturating_sub(window));
                let mut before: Option<Slot> = None;
                for p in from..span.context_len {
                    let slot = self.stored(batch, g, s, p)?;
                    let expected = before.map_or(EMPTY, |before| before.prefix);
                    if (before.is_some() || p == 0) && slot.prefix != extend(expected, slot.token) {
                        return refuse(format!(
                            "group {g}: position {p} of sequence {s} belongs to another prefix"
                        ));
                    }
                    before = Some(slot);
                }
                let last = hashes[(span.first_row + span.rows - 1) as usize];
                if before.is_none_or(|slot| slot.prefix != last) {
                    return refuse(format!(
                        "group {g}: sequence {s} ends in another prefix than group 0"
                    ));
                }
            }
        }
        Ok(())
    }

    fn starts_with(&self, batch: &BatchMeta, s: usize, token: u32) -> bool {
        self.stored(batch, 0, s, 0).is_ok_and(|slot| slot.token == token)
    }
}

fn refuse<T>(detail: String) -> Result<T> {
    Err(Error::Batch(detail))
}

impl Executor for ScriptedExecutor {
    fn submit(&mut self, batch: &BatchMeta) -> Result<Ticket> {
        self.validate(batch)?;
        self.copy_blocks(batch)?;
        let hashes = self.write(batch)?;
        self.read(batch, &hashes)?;
        self.rows += batch.tokens.len();
        self.steps += 1;
        let mut logits = Logits {
            data: Vec::new(),
            vocab: self.vocab,
        };
        for &row in &batch.output_rows {
            let owner = batch
                .seqs
                .iter()
                .position(|span| (span.first_row..span.first_row + span.rows).contains(&row));
            let broken = self
                .nan_for
                .zip(owner)
                .is_some_and(|(token, s)| self.starts_with(batch, s, token));
            if broken {
                logits.data.extend(std::iter::repeat_n(f32::NAN, self.vocab));
            } else {
                logits.data.extend(self.logits(hashes[row as usize]));
            }
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.pending.insert(ticket, logits);
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket, logits: &mut Logits) -> Result<()> {
        match self.pending.remove(&ticket.0) {
            Some(done) => {
                *logits = done;
                Ok(())
            }
            None => refuse(format!("ticket {} is not in flight", ticket.0)),
        }
    }
}
