// Package datadir is the plugin's data directory on the host: its lock, the places of
// the journal and of the containers' marks, and the hook program that container
// runtimes start from there.
package datadir
