// The Kotlin API for desktop JVMs: copy this folder into a project, and add include(":edge") to its settings.gradle.kts.
plugins {
    kotlin("jvm")
}

dependencies {
    compileOnly("org.jetbrains.kotlinx:kotlinx-serialization-json:1.8.1") // of Schemas.kt, for apps that have it
    api("org.jetbrains.kotlinx:kotlinx-coroutines-core:1.8.1")
}
