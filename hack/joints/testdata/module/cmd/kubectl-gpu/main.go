// Kubectl-gpu has nothing to count.
package main

func main() {}
