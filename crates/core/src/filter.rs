//! Filters of seccomp: which system calls a program of classic BPF allows.
//!
//! The engine asks here before it lives under a filter of the program's ([`Evaluator::allows`]). A part of a
//! call that isn't known, as the instruction's address, may have any value. Where a branch depends on an
//! unknown value, both ways are followed. So the answer "allowed" holds for every value, and the answer "not
//! allowed" may be too careful. Branches only go forward, so one pass over the instructions finds all ends.
//! [`is_valid`] refuses what Linux refuses.

/// One instruction, as the kernel takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// Operation code.
    pub code: u16,
    /// Instructions to skip if the condition holds.
    pub if_true: u8,
    /// Instructions to skip if the condition doesn't hold.
    pub if_false: u8,
    /// The instruction's constant.
    pub k: u32,
}

/// Instructions in a filter, at most (`BPF_MAXINSNS`).
pub const INSTRUCTIONS_MAX: usize = 4096;
/// Words of scratch memory (`BPF_MEMWORDS`).
const WORDS: usize = 16;
/// Bytes of the data that a filter reads (`struct seccomp_data`).
const DATA_BYTES: u32 = 64;
/// The architecture that a filter sees for the engine's calls (`AUDIT_ARCH_X86_64`).
const X86_64: u32 = 0xc000_003e;

/// Answers of a filter that let a call be made (`SECCOMP_RET_*`), without their lower half.
const ALLOW: u32 = 0x7fff_0000;
const LOG: u32 = 0x7ffc_0000;
/// Answers that keep a call from being made, or leave it to a tracer. The thread goes on.
const ERRNO: u32 = 0x0005_0000;
const TRACE: u32 = 0x7ff0_0000;
/// The answer that leaves the decision to another program.
const USER_NOTIF: u32 = 0x7fc0_0000;
/// The answer that ends the whole process.
const KILL_PROCESS: u32 = 0x8000_0000;
const ACTION: u32 = 0xffff_0000;

/// Operation codes, in the kernel's terms: class, size and mode, or operation and source.
mod code {
    pub const LD_ABS: u16 = 0x20;
    pub const LD_LEN: u16 = 0x80;
    pub const LDX_LEN: u16 = 0x81;
    pub const LD_IMM: u16 = 0x00;
    pub const LDX_IMM: u16 = 0x01;
    pub const LD_MEM: u16 = 0x60;
    pub const LDX_MEM: u16 = 0x61;
    pub const ST: u16 = 0x02;
    pub const STX: u16 = 0x03;
    pub const RET_K: u16 = 0x06;
    pub const RET_A: u16 = 0x16;
    pub const TAX: u16 = 0x07;
    pub const TXA: u16 = 0x87;
    pub const NEG: u16 = 0x84;
    pub const JA: u16 = 0x05;
    /// Classes of arithmetic and of jumps.
    pub const ALU: u16 = 0x04;
    pub const JMP: u16 = 0x05;
    pub const CLASS: u16 = 0x07;
    /// Says that the other operand is X, not K.
    pub const X: u16 = 0x08;
    pub const OPERATION: u16 = 0xf0;
    pub const ADD: u16 = 0x00;
    pub const SUB: u16 = 0x10;
    pub const MUL: u16 = 0x20;
    pub const DIV: u16 = 0x30;
    pub const OR: u16 = 0x40;
    pub const AND: u16 = 0x50;
    pub const LSH: u16 = 0x60;
    pub const RSH: u16 = 0x70;
    pub const XOR: u16 = 0xa0;
    pub const JEQ: u16 = 0x10;
    pub const JGT: u16 = 0x20;
    pub const JGE: u16 = 0x30;
    pub const JSET: u16 = 0x40;
}

impl Instruction {
    const fn is_of(self, class: u16) -> bool {
        self.code & code::CLASS == class && self.code & !(code::CLASS | code::X | code::OPERATION) == 0
    }

    /// Returns the operation, if the instruction is arithmetic with two operands.
    fn arithmetic(self) -> Option<u16> {
        use code::{ADD, ALU, AND, DIV, LSH, MUL, OPERATION, OR, RSH, SUB, XOR};
        let operation = self.code & OPERATION;
        let is_known = [ADD, SUB, MUL, DIV, OR, AND, LSH, RSH, XOR].contains(&operation);
        (self.is_of(ALU) && is_known).then_some(operation)
    }

    /// Returns the condition, if the instruction is a jump with a condition.
    fn condition(self) -> Option<u16> {
        use code::{JEQ, JGE, JGT, JMP, JSET, OPERATION};
        let operation = self.code & OPERATION;
        (self.is_of(JMP) && [JEQ, JGT, JGE, JSET].contains(&operation)).then_some(operation)
    }

    const fn uses_x(self) -> bool {
        self.code & code::X != 0
    }

    /// Whether the instruction may stand at position `at` of a program of `length` instructions.
    fn may_stand(self, at: usize, length: usize) -> bool {
        use code::{
            DIV, JA, LD_ABS, LD_IMM, LD_LEN, LD_MEM, LDX_IMM, LDX_LEN, LDX_MEM, LSH, NEG, RET_A, RET_K, RSH,
            ST, STX, TAX, TXA,
        };
        let k = self.k as usize;
        // The next instruction, and all that follow.
        let behind = length - at - 1;
        match self.code {
            LD_ABS => self.k < DATA_BYTES && self.k.is_multiple_of(4),
            LD_LEN | LDX_LEN | LD_IMM | LDX_IMM | RET_K | RET_A | TAX | TXA | NEG => true,
            LD_MEM | LDX_MEM | ST | STX => k < WORDS,
            JA => k < behind,
            _ if self.condition().is_some() => {
                usize::from(self.if_true) < behind && usize::from(self.if_false) < behind
            }
            _ => match self.arithmetic() {
                Some(DIV) => self.uses_x() || self.k != 0,
                Some(LSH | RSH) => self.uses_x() || self.k < u32::BITS,
                Some(_) => true,
                None => false,
            },
        }
    }
}

/// Whether Linux takes the program as a filter. `scratch` must have a word for each instruction.
pub fn is_valid(program: &[Instruction], scratch: &mut [u16]) -> bool {
    let length = program.len();
    let ends = program.last().is_some_and(|last| matches!(last.code, code::RET_K | code::RET_A));
    let may_stand = |(at, instruction): (usize, &Instruction)| instruction.may_stand(at, length);
    length <= INSTRUCTIONS_MAX
        && ends
        && program.iter().enumerate().all(may_stand)
        && reads_what_is_written(program, scratch)
}

/// Whether no path reads a word of scratch memory before it is written, checked as Linux checks it.
fn reads_what_is_written(program: &[Instruction], scratch: &mut [u16]) -> bool {
    let written_at = &mut scratch[..program.len()];
    written_at.fill(u16::MAX);
    let mut written = 0_u16;
    for (at, instruction) in program.iter().enumerate() {
        written &= written_at[at];
        let word = || 1_u16 << instruction.k;
        match instruction.code {
            code::ST | code::STX => written |= word(),
            code::LD_MEM | code::LDX_MEM if written & word() == 0 => return false,
            code::JA => {
                written_at[at + 1 + instruction.k as usize] &= written;
                written = u16::MAX;
            }
            _ if instruction.condition().is_some() => {
                written_at[at + 1 + usize::from(instruction.if_true)] &= written;
                written_at[at + 1 + usize::from(instruction.if_false)] &= written;
                written = u16::MAX;
            }
            _ => {}
        }
    }
    true
}

/// A system call, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The call's number.
    pub number: u32,
    /// The call's arguments. `None` stands for any value.
    pub arguments: [Option<u64>; 6],
}

impl Call {
    /// Returns a call with any arguments.
    pub const fn any(number: u32) -> Call {
        Call { number, arguments: [None; 6] }
    }

    /// Returns the word of `struct seccomp_data` at `offset`, if it is known.
    fn word_at(&self, offset: u32) -> Option<u32> {
        match offset {
            0 => Some(self.number),
            4 => Some(X86_64),
            // The instruction's address.
            8 | 12 => None,
            _ => {
                let argument = self.arguments[(offset as usize - 16) / 8]?;
                Some(if offset.is_multiple_of(8) { argument as u32 } else { (argument >> 32) as u32 })
            }
        }
    }
}

/// Registers and memory before one instruction. `None` means that the value isn't known.
#[derive(Clone, Copy, Debug)]
struct State {
    is_reached: bool,
    a: Option<u32>,
    x: Option<u32>,
    words: [Option<u32>; WORDS],
}

impl State {
    const UNREACHED: State = State { is_reached: false, a: None, x: None, words: [None; WORDS] };
    const START: State = State { is_reached: true, a: Some(0), x: Some(0), words: [None; WORDS] };

    /// Keeps what holds both in this state and in `other`.
    fn join(&mut self, other: &State) {
        if !self.is_reached {
            *self = *other;
            return;
        }
        let join = |own: &mut Option<u32>, other: Option<u32>| *own = own.filter(|own| Some(*own) == other);
        join(&mut self.a, other.a);
        join(&mut self.x, other.x);
        self.words.iter_mut().zip(other.words).for_each(|(own, other)| join(own, other));
    }
}

/// Memory for the evaluation of filters.
#[derive(Debug)]
pub struct Evaluator {
    states: [State; INSTRUCTIONS_MAX],
}

impl Default for Evaluator {
    fn default() -> Self {
        Evaluator::new()
    }
}

impl Evaluator {
    /// Returns an evaluator for programs of any length.
    pub const fn new() -> Evaluator {
        Evaluator { states: [State::UNREACHED; INSTRUCTIONS_MAX] }
    }

    /// Whether a valid program lets `call` be made, for every value of what isn't known of the call.
    pub fn allows(&mut self, program: &[Instruction], call: &Call) -> bool {
        self.for_each_end(program, call, |answer| answer.is_some_and(lets_pass))
    }

    /// Whether a valid program may let `call` be made, for some value of what isn't known of the call. An
    /// answer by which a tracer or another program decides counts as yes.
    pub fn may_allow(&mut self, program: &[Instruction], call: &Call) -> bool {
        let may_pass = |answer| lets_pass(answer) || matches!(answer & ACTION, TRACE | USER_NOTIF);
        !self.for_each_end(program, call, |answer| answer.is_some_and(|answer| !may_pass(answer)))
    }

    /// Whether a thread may make `call` with a lock held and signals blocked. Every answer must let the
    /// thread go on, or end the whole process.
    pub fn is_bearable(&mut self, program: &[Instruction], call: &Call) -> bool {
        let is_bearable =
            |answer| lets_pass(answer) || matches!(answer & ACTION, ERRNO | TRACE | KILL_PROCESS);
        self.for_each_end(program, call, |answer| answer.is_some_and(is_bearable))
    }

    /// Calls `visit` for each end of the program, with the answer there if it is known. Stops when `visit`
    /// returns false. Returns whether `visit` never did.
    fn for_each_end(
        &mut self,
        program: &[Instruction],
        call: &Call,
        mut visit: impl FnMut(Option<u32>) -> bool,
    ) -> bool {
        let states = &mut self.states[..program.len()];
        states.iter_mut().for_each(|state| state.is_reached = false);
        states[0] = State::START;
        for (at, instruction) in program.iter().enumerate() {
            let mut state = states[at];
            if !state.is_reached {
                continue;
            }
            let next = match step(*instruction, &mut state, call) {
                Next::End(answer) if visit(answer) => continue,
                Next::End(_) => return false,
                Next::At(skipped) => skipped,
            };
            for skipped in next.into_iter().flatten() {
                states[at + 1 + skipped].join(&state);
            }
        }
        true
    }
}

const fn lets_pass(answer: u32) -> bool {
    matches!(answer & ACTION, ALLOW | LOG)
}

enum Next {
    /// The program ends with this answer. `None` means that the answer may be any.
    End(Option<u32>),
    /// The program goes on after skipping this many instructions, on one path or on two.
    At([Option<usize>; 2]),
}

fn step(instruction: Instruction, state: &mut State, call: &Call) -> Next {
    let Instruction { code, k, .. } = instruction;
    match code {
        code::LD_ABS => state.a = call.word_at(k),
        code::LD_LEN => state.a = Some(DATA_BYTES),
        code::LDX_LEN => state.x = Some(DATA_BYTES),
        code::LD_IMM => state.a = Some(k),
        code::LDX_IMM => state.x = Some(k),
        code::LD_MEM => state.a = state.words[k as usize],
        code::LDX_MEM => state.x = state.words[k as usize],
        code::ST => state.words[k as usize] = state.a,
        code::STX => state.words[k as usize] = state.x,
        code::TAX => state.x = state.a,
        code::TXA => state.a = state.x,
        code::NEG => state.a = state.a.map(u32::wrapping_neg),
        code::RET_K => return Next::End(Some(k)),
        code::RET_A => return Next::End(state.a),
        code::JA => return Next::At([Some(k as usize), None]),
        _ => {
            let operand = if instruction.uses_x() { state.x } else { Some(k) };
            if let Some(condition) = instruction.condition() {
                return branch(instruction, condition, state.a, operand);
            }
            if instruction.arithmetic() == Some(code::DIV) && operand.is_none_or(|operand| operand == 0) {
                // The kernel answers 0 to a division by 0. After a division by an unknown value the answer
                // may be any.
                return Next::End(operand);
            }
            let known = state.a.zip(operand).zip(instruction.arithmetic());
            state.a = known.and_then(|((a, operand), operation)| computed(operation, a, operand));
        }
    }
    Next::At([Some(0), None])
}

fn branch(instruction: Instruction, condition: u16, a: Option<u32>, operand: Option<u32>) -> Next {
    let ways = [instruction.if_true, instruction.if_false].map(usize::from);
    let Some((a, operand)) = a.zip(operand) else { return Next::At(ways.map(Some)) };
    let holds = match condition {
        code::JEQ => a == operand,
        code::JGT => a > operand,
        code::JGE => a >= operand,
        _ => a & operand != 0,
    };
    Next::At([Some(ways[usize::from(!holds)]), None])
}

/// Returns the result of an operation. `None` means that the kernel's result isn't known.
fn computed(operation: u16, a: u32, operand: u32) -> Option<u32> {
    match operation {
        code::ADD => Some(a.wrapping_add(operand)),
        code::SUB => Some(a.wrapping_sub(operand)),
        code::MUL => Some(a.wrapping_mul(operand)),
        code::DIV => a.checked_div(operand),
        code::OR => Some(a | operand),
        code::AND => Some(a & operand),
        code::XOR => Some(a ^ operand),
        code::LSH => a.checked_shl(operand),
        code::RSH => a.checked_shr(operand),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILL: u32 = 0x8000_0000;
    const EPERM: u32 = 0x0005_0001;

    const fn statement(code: u16, k: u32) -> Instruction {
        Instruction { code, if_true: 0, if_false: 0, k }
    }

    const fn jump(condition: u16, k: u32, if_true: u8, if_false: u8) -> Instruction {
        Instruction { code: code::JMP | condition, if_true, if_false, k }
    }

    fn allows(program: &[Instruction], call: Call) -> bool {
        assert!(is_valid(program, &mut vec![0; program.len()]));
        Evaluator::new().allows(program, &call)
    }

    #[test]
    fn whitelist_allows_what_is_on_it_and_nothing_else() {
        let program = [
            statement(code::LD_ABS, 4),
            jump(code::JEQ, X86_64, 1, 0),
            statement(code::RET_K, KILL),
            statement(code::LD_ABS, 0),
            jump(code::JEQ, 1, 2, 0),
            jump(code::JEQ, 60, 1, 0),
            statement(code::RET_K, KILL),
            statement(code::RET_K, ALLOW),
        ];
        assert!(allows(&program, Call::any(1)) && allows(&program, Call::any(60)));
        assert!(!allows(&program, Call::any(2)));
    }

    #[test]
    fn every_answer_but_two_forbids() {
        for answer in [KILL, 0, EPERM, 0x0003_0000, 0x7ff0_0000, 0x7fc0_0000] {
            assert!(!allows(&[statement(code::RET_K, answer)], Call::any(1)), "{answer:x}");
        }
        assert!(allows(&[statement(code::RET_K, ALLOW)], Call::any(1)));
        assert!(allows(&[statement(code::RET_K, LOG | 7)], Call::any(1)));
    }

    #[test]
    fn arguments_count_if_they_are_known_and_may_be_anything_else() {
        let program = [
            statement(code::LD_ABS, 16 + 8 * 2),
            jump(code::JSET, 4, 0, 1),
            statement(code::RET_K, EPERM),
            statement(code::RET_K, ALLOW),
        ];
        let with = |argument| Call { arguments: [None, None, argument, None, None, None], ..Call::any(10) };
        assert!(allows(&program, with(Some(3))));
        assert!(!allows(&program, with(Some(7))));
        assert!(!allows(&program, with(None)));
        assert!(Evaluator::new().may_allow(&program, &with(None)));
        assert!(!Evaluator::new().may_allow(&program, &with(Some(7))));
        let by_address = [statement(code::LD_ABS, 8), jump(code::JGT, 9, 0, 0), statement(code::RET_A, 0)];
        assert!(!allows(&by_address, Call::any(1)), "its answer is the call's address");
    }

    #[test]
    fn what_two_ways_leave_behind_is_known_if_it_is_the_same() {
        let program = |other| {
            [
                statement(code::LD_ABS, 8),
                jump(code::JEQ, 0, 0, 2),
                statement(code::LD_IMM, ALLOW),
                statement(code::JA, 1),
                statement(code::LD_IMM, other),
                statement(code::RET_A, 0),
            ]
        };
        assert!(allows(&program(ALLOW), Call::any(1)));
        assert!(!allows(&program(LOG), Call::any(1)), "either would do; it isn't known which");
        assert!(!allows(&program(KILL), Call::any(1)));
    }

    #[test]
    fn tracers_and_other_programs_may_allow() {
        let may_allow = |answer| Evaluator::new().may_allow(&[statement(code::RET_K, answer)], &Call::any(1));
        assert!(may_allow(TRACE) && may_allow(USER_NOTIF) && may_allow(ALLOW) && may_allow(LOG));
        assert!(!may_allow(EPERM) && !may_allow(KILL) && !may_allow(0x0003_0000));
    }

    #[test]
    fn answers_that_end_or_interrupt_one_thread_are_not_bearable_with_a_lock() {
        let is_bearable =
            |answer| Evaluator::new().is_bearable(&[statement(code::RET_K, answer)], &Call::any(1));
        for answer in [ALLOW, LOG, EPERM, TRACE, KILL_PROCESS] {
            assert!(is_bearable(answer), "{answer:x}");
        }
        // SECCOMP_RET_KILL_THREAD, SECCOMP_RET_TRAP, and the answer that waits for another program.
        for answer in [0, 0x0003_0000, USER_NOTIF] {
            assert!(!is_bearable(answer), "{answer:x}");
        }
        let by_address = [statement(code::LD_ABS, 8), statement(code::RET_A, 0)];
        assert!(!Evaluator::new().is_bearable(&by_address, &Call::any(1)));
    }

    #[test]
    fn division_by_what_may_be_zero_forbids() {
        let by_x = [
            statement(code::LD_IMM, ALLOW),
            statement(code::ALU | code::DIV | code::X, 0),
            statement(code::RET_K, ALLOW),
        ];
        assert!(!allows(&by_x, Call::any(1)));
        let by_one = [statement(code::LDX_IMM, 1), by_x[0], by_x[1], statement(code::RET_A, 0)];
        assert!(allows(&by_one, Call::any(1)));
        let by_address = [statement(code::LD_ABS, 8), statement(code::TAX, 0), by_x[0], by_x[1], by_x[2]];
        assert!(!allows(&by_address, Call::any(1)));
        assert!(Evaluator::new().may_allow(&by_address, &Call::any(1)), "where the address isn't 0");
    }

    #[test]
    fn programs_are_refused_as_linux_refuses_them() {
        let valid = |program: &[Instruction]| is_valid(program, &mut vec![0; program.len()]);
        let end = statement(code::RET_K, ALLOW);
        assert!(!valid(&[]));
        assert!(!valid(&[statement(code::LD_IMM, 0)]), "no end");
        assert!(!valid(&vec![end; INSTRUCTIONS_MAX + 1]));
        assert!(valid(&vec![end; INSTRUCTIONS_MAX]));
        assert!(!valid(&[statement(code::LD_ABS, 64), end]) && !valid(&[statement(code::LD_ABS, 2), end]));
        assert!(!valid(&[jump(code::JEQ, 0, 1, 0), end]) && valid(&[jump(code::JEQ, 0, 0, 0), end]));
        assert!(!valid(&[statement(code::JA, u32::MAX), end]));
        assert!(!valid(&[statement(code::LD_MEM, 3), end]), "never written");
        let one_way = [jump(code::JEQ, 0, 0, 1), statement(code::ST, 3), statement(code::LD_MEM, 3), end];
        assert!(!valid(&one_way), "written on one of two ways");
        assert!(valid(&[statement(code::STX, 3), statement(code::LD_MEM, 3), end]));
        assert!(!valid(&[statement(code::ALU | code::DIV, 0), end]));
        assert!(!valid(&[statement(code::ALU | code::LSH, 32), end]));
        assert!(!valid(&[statement(code::ALU | 0x90, 3), end]), "no remainder in filters");
        assert!(!valid(&[statement(0x28, 0), end]), "no half-words");
    }
}
