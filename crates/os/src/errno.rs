//! Error numbers, each in the two forms in which Farpage meets it: as an [`Errno`], and as the word that a
//! system call returns.

/// A failed call's error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

macro_rules! numbers {
    ($($name:ident)*) => {
        #[allow(missing_docs, reason = "they are the kernel's names")]
        impl Errno {
            $(pub const $name: Errno = Errno(linux_raw_sys::errno::$name as i32);)*
        }

        /// The words that a system call returns for these errors.
        pub mod returned {
            #![allow(missing_docs, reason = "they are the kernel's names")]
            $(pub const $name: isize = -(linux_raw_sys::errno::$name as isize);)*
        }
    };
}

numbers! {
    EACCES EAGAIN EBADF EFAULT EINTR EINVAL EIO ENOENT ENOMEM ENOSYS ENOTTY EOPNOTSUPP EPERM ESRCH
}
