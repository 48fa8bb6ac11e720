// Package journal stores on disk which claim holds which devices, and which
// partitions and settings were changed on which GPU, so that they are known
// after a crash, a reboot, or a change of the plugin's version.
//
// There is one file per claim, named by the claim's UID, so that the cost of a
// write doesn't depend on how many claims there are; and, in directories of their
// own, one per GPU on which MIG partitions were made, one per GPU whose compute
// mode or time slice differs from its original one, one per GPU with something wrong,
// and one of the GPUs that were seen. Reads are served from memory: Claims lists all
// claims, each with the state of its record and the phase of its unprepare.
//
// A file is written under another name and renamed, so that a crash leaves
// the old record or the new one. The records of claims, of GPUs with something wrong and of
// the GPUs that were seen, data and name, are on disk when their write returns. Those of
// partitions and settings needn't survive a crash of the machine.
//
// A file is unreadable if its content isn't a record. Open renames it, and its claim
// or GPU stays unreadable until another record replaces it or it is known that there is
// none. A file that the disk fails to read isn't unreadable:
// the journal isn't opened without it.
//
// The file's envelope is {"version", "crc32", "body"}; the checksum is over the
// bytes of the body. The body consists of types of pkg/node/holding, pkg/health and pkg/gpu: no
// library's struct goes to disk. Fields may be added at any time: readers skip
// those they don't know. The version is raised only when an older reader would
// do harm, and an older reader refuses to start on such a file.
//
// The journal knows nothing of Kubernetes objects, CDI or hardware. Each kind of record
// has one writer: prepare writes claims, partition the partitions, sharing the settings,
// healthmonitor the health, and driver, at the start pkg/node, the GPUs that were seen.
package journal
