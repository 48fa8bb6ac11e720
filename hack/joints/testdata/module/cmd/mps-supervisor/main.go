// Mps-supervisor has nothing to count.
package main

func main() {}
