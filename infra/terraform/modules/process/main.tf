# One background process on this machine, started, awaited and stopped by process.py. Terraform's built-in provider only.

terraform { required_version = ">= 1.11" }

variable "name" {
  description = "Name of the process, and of its folder."
  type        = string
}

variable "folder" {
  description = "Where the process's folder, with its log and its record, is made."
  type        = string
}

variable "command" {
  description = "Program and arguments, started in the process's folder."
  type        = list(string)
}

variable "environment" {
  description = "Environment of the process, besides Terraform's own."
  type        = map(string)
  default     = {}
}

variable "ready" {
  description = "When the process counts as up: its URL answers 2xx, and the answer contains the text."
  type        = object({ url = string, contains = optional(string, "") })
}

variable "start_s" {
  description = "Seconds the process has to become ready."
  type        = number
  default     = 180
}

variable "stop_s" {
  description = "Seconds the process has to end after SIGTERM before it is killed."
  type        = number
  default     = 25
}

locals {
  spec = {
    folder      = abspath("${var.folder}/${var.name}")
    command     = var.command
    environment = var.environment
    ready       = var.ready
    start_s     = var.start_s
    stop_s      = var.stop_s
  }
}

resource "terraform_data" "this" {
  triggers_replace = { # a provisioner that destroys may read nothing but this; a change, or a death counted by `refresh`, replaces
    program = abspath("${path.module}/process.py")
    spec    = jsonencode(local.spec)
    deaths  = try(trimspace(file("${local.spec.folder}/deaths")), "0")
  }

  provisioner "local-exec" {
    command     = self.triggers_replace.spec
    interpreter = ["python3", self.triggers_replace.program, "start"]
  }

  provisioner "local-exec" {
    when        = destroy
    command     = self.triggers_replace.spec
    interpreter = ["python3", self.triggers_replace.program, "stop"]
  }
}

output "id" {
  description = "Known once the process has answered."
  value       = terraform_data.this.id
}
